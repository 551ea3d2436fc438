"""Compiled twins of the hot loops that read whole tensors: digests, comparing, rounding. See `compiling.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.compiling import WORTH_COMPILING, Kernel, view

if TYPE_CHECKING:
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


def _digest_changes(width: int) -> Build:
    def build(numba: Any) -> Source:
        splitmix64 = numba.njit(_splitmix64)

        def digest_changes(index, first, old, new, keys0, keys1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
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

        types, keys = numba.types, view(numba, "uint64")
        bits = view(numba, f"uint{8 * width}")
        result = types.UniTuple(types.uint64, 4)
        signatures = [result(view(numba, kind), types.int64, bits, bits, keys, keys) for kind in ("uint32", "int64")]
        return digest_changes, signatures

    return build


def _changed(numba: Any) -> Source:
    def changed(old, new, per_word, num_bits, hit, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        # Both loops store always and advance only on a difference: no branch that 1% of the words would mispredict.
        num_hit = np.int64(0)
        for i in range(old.size):
            hit[num_hit] = i
            num_hit += np.int64(old[i] != new[i])
        num_out = np.int64(0)
        mask = (_U(1) << _U(num_bits)) - _U(1) if num_bits < 64 else ~_U(0)
        for i in range(num_hit):
            at = np.int64(hit[i])
            word = old[at] ^ new[at]
            for element in range(per_word):
                out[num_out] = at * per_word + element
                num_out += np.int64(((word >> _U(element * num_bits)) & mask) != _U(0))
        return num_out

    types, words = numba.types, view(numba, "uint64")
    scratch = types.Array(types.int32, 1, "C")
    signature = types.int64(words, words, types.int64, types.int64, scratch, scratch)
    return changed, [signature]


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
"""By element width: (ascending position uint32 or int64, to be added to each, old, new, keys0, keys1) -> (D_0, D_1) of
the old bits, (D_0, D_1) of the new ones."""
CHANGED = Kernel(_changed)
"""(old uint64, new uint64, elements per word, bits per element, int32 [words], int32 [elements]) -> count."""
ROUND_BF16 = Kernel(_round_bf16)
"""(fp32 bits uint32 [n], NaN bits, uint16 [n]); nearest even."""
