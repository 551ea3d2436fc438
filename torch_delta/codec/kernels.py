"""Compiled twins of the hot loops that read whole tensors: digests, comparing, rounding. See `compiling.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec import lanes
from torch_delta.codec.addresses import array_at
from torch_delta.codec.compiling import WORTH_COMPILING, Kernel, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

_U = np.uint64


def _splitmix64(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  compiled by numba, typed by its signature
    x += _U(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
    return x ^ (x >> _U(31))


def _digest_rows(dtype: str) -> Build:
    def build(numba: Any) -> Source:
        splitmix64 = numba.njit(_splitmix64)

        def digest_rows(words, num_rows, row_length, start, stride, keys0, keys1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
            lane0 = lane1 = _U(0)
            for row in range(num_rows):
                at = row * row_length
                end = at + row_length
                index = start + row * stride
                while at < end:
                    column = index & 1023
                    size = min(1024 - column, end - at)
                    # Views, so that the inner loop has no index that could be negative and is vectorised.
                    part = words[at : at + size]
                    part0 = keys0[column : column + size]
                    part1 = keys1[column : column + size]
                    sum0 = sum1 = _U(0)
                    for i in range(size):
                        word = _U(part[i])
                        sum0 += word * part0[i]
                        sum1 += word * part1[i]
                    block = _U(index >> 10)
                    lane0 += sum0 * (splitmix64(_U(2 << 48) + block) | _U(1))
                    lane1 += sum1 * (splitmix64(_U(3 << 48) + block) | _U(1))
                    at += size
                    index += size
            return lane0, lane1

        types, keys = numba.types, view(numba, "uint64")
        counts = [types.int64] * 4
        signature = types.UniTuple(types.uint64, 2)(view(numba, dtype), *counts, keys, keys)
        return digest_rows, [signature]

    return build


def _digest_delta(numba: Any) -> Source:
    splitmix64 = numba.njit(_splitmix64)

    def digest_delta(index, delta, keys0, keys1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        # Block keys are computed anew for every element: without a branch the loop is vectorised, and twice as fast.
        lane0 = lane1 = _U(0)
        for i in range(index.size):
            at = index[i]
            column, block = _U(at & 1023), _U(at >> 10)
            lane0 += keys0[column] * (splitmix64(_U(2 << 48) + block) | _U(1)) * delta[i]
            lane1 += keys1[column] * (splitmix64(_U(3 << 48) + block) | _U(1)) * delta[i]
        return lane0, lane1

    types, keys = numba.types, view(numba, "uint64")
    signature = types.UniTuple(types.uint64, 2)(view(numba, "int64"), keys, keys, keys)
    return digest_delta, [signature]


def _sums_of_changes(numba: Any) -> Callable[..., Any]:
    """Digests of the old and of the new bits of elements in ascending positions."""
    splitmix64 = numba.njit(_splitmix64)

    def sums_of_changes(index, first, old, new, keys0, keys1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        # Positions ascend, so that block keys are needed once per block: sums of a block first.
        before0 = before1 = after0 = after1 = _U(0)
        old0 = old1 = new0 = new1 = _U(0)
        block = np.int64(-1)
        for i in range(index.size):
            at = first + np.int64(index[i])
            if at >> 10 != block:
                if i:
                    key0 = splitmix64(_U(2 << 48) + _U(block)) | _U(1)
                    key1 = splitmix64(_U(3 << 48) + _U(block)) | _U(1)
                    before0, before1 = before0 + old0 * key0, before1 + old1 * key1
                    after0, after1 = after0 + new0 * key0, after1 + new1 * key1
                    old0 = old1 = new0 = new1 = _U(0)
                block = at >> 10
            column = _U(at & 1023)
            was, now = _U(old[i]), _U(new[i])
            old0 += keys0[column] * was
            old1 += keys1[column] * was
            new0 += keys0[column] * now
            new1 += keys1[column] * now
        key0 = splitmix64(_U(2 << 48) + _U(block)) | _U(1)
        key1 = splitmix64(_U(3 << 48) + _U(block)) | _U(1)
        return before0 + old0 * key0, before1 + old1 * key1, after0 + new0 * key0, after1 + new1 * key1

    compiled: Callable[..., Any] = numba.njit(sums_of_changes, nogil=True)
    return compiled


def _digest_changes(width: int) -> Build:
    def build(numba: Any) -> Source:
        sums_of_changes = _sums_of_changes(numba)

        def digest_changes(index, firsts, starts, old, new, keys0, keys1, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
            for number in range(firsts.size):
                begin, end = starts[number], starts[number + 1]
                if end > begin:
                    out[number, 0], out[number, 1], out[number, 2], out[number, 3] = sums_of_changes(
                        index[begin:end], firsts[number], old[begin:end], new[begin:end], keys0, keys1
                    )

        types, keys, ints = numba.types, view(numba, "uint64"), view(numba, "int64")
        bits, out = view(numba, f"uint{8 * width}"), types.Array(types.uint64, 2, "C")
        signatures = [
            types.void(view(numba, kind), ints, ints, bits, bits, keys, keys, out) for kind in ("uint32", "int64")
        ]
        return digest_changes, signatures

    return build


def _overwrite(width: int) -> Build:
    def build(numba: Any) -> Source:
        whole_at = array_at(numba, f"uint{8 * width}", readonly=False)
        positions_at, values_at = array_at(numba, "uint32"), array_at(numba, f"uint{8 * width}")

        def overwrite(slices):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            for number in range(slices.shape[0]):
                where, size, first, positions, values, count = slices[number]
                whole, index, value = whole_at(where, size), positions_at(positions, count), values_at(values, count)
                for i in range(count):
                    at = first + np.int64(index[i])
                    if at >= size:
                        return number
                    whole[_U(at)] = value[i]
            return np.int64(-1)

        types = numba.types
        return overwrite, [types.int64(types.Array(types.int64, 2, "C", readonly=True, aligned=False))]

    return build


def _changed(width: int) -> Build:
    def build(numba: Any) -> Source:
        differences = lanes.differences(numba)

        def changed(old, new, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            whole = old.size - old.size % lanes.LANES
            count = differences(old, new, 0, whole, 0, out, np.int64(0))
            for i in range(whole, old.size):
                if old[i] != new[i]:
                    out[count] = i
                    count += 1
            return count

        types, bits = numba.types, view(numba, f"uint{8 * width}")
        return changed, [types.int64(bits, bits, types.Array(types.int32, 1, "C"))]

    return build


def _round_bf16(numba: Any) -> Source:
    def round_bf16(master, nan_bits, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for i in range(master.size):
            bits = master[i]
            even = (bits >> np.uint32(16)) & np.uint32(1)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[i] = np.uint16(np.uint32(nan_bits) if is_nan else rounded)

    types = numba.types
    signature = types.void(view(numba, "uint32"), types.uint32, types.Array(types.uint16, 1, "C"))
    return round_bf16, [signature]


DIGEST_ROWS = {width: Kernel(_digest_rows(f"uint{8 * width}")) for width in (1, 2, 4)}
"""By bytes per word: (words, num_rows, row_length, start, stride, keys0, keys1) -> (D_0, D_1)."""
DIGEST_DELTA = Kernel(_digest_delta, WORTH_COMPILING >> 4)  # numpy spends 20 times as long on an element here
"""(word index int64, delta uint64, keys0, keys1) -> (D_0, D_1)."""
DIGEST_CHANGES = {width: Kernel(_digest_changes(width), WORTH_COMPILING >> 4) for width in (1, 2, 4)}
"""By element width, for elements of several boxes one after the other: (positions uint32 or int64 that ascend in each
box, int64 [num_boxes] to be added to them, starts int64 [num_boxes + 1], old, new, keys0, keys1, sums); `sums` uint64
[num_boxes, 4] becomes (D_0, D_1) of the old bits and (D_0, D_1) of the new ones, where a box has elements."""
OVERWRITE = {width: Kernel(_overwrite(width), WORTH_COMPILING >> 2) for width in (1, 2, 4, 8)}
"""By element width: rows of int64 [num_slices, 6] with address and elements of a flat array, what to add to positions,
addresses of positions (uint32) and of values, and how many -> the first slice that leaves its array, or -1."""
CHANGED = {width: Kernel(_changed(width)) for width in (1, 2, 4, 8)}
"""By bytes per element: (old [n], new [n], int32 [n]) -> count; positions that differ, n < 2^31."""
ROUND_BF16 = Kernel(_round_bf16)
"""(fp32 bits uint32 [n], NaN bits, uint16 [n]); nearest even."""
