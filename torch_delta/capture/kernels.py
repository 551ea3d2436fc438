"""Compiled passes of capture on the host: compare, take what differs, and move the copy along, in one reading.

Twins of the plain path in `sweep.py`, bit for bit (tests prove it); see `torch_delta.codec.kernels` for when a kernel
is compiled and what becomes of it without numba.

One block of `BLOCK` elements stays in the first cache level through all stages: rounding (vectorised), finding words of
8 bytes that differ (a store for every word, no branch that a change would mispredict), then the words found. Most hold
one changed element, whose place comes from two comparisons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torch_delta.codec.kernels import Kernel, view

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK: Final = 4096
"""Elements per block."""

_U = np.uint64


def _writable(numba: Any, dtype: str) -> Any:
    """Type of a 1-D contiguous array that is written, at any alignment."""
    return numba.types.Array(getattr(numba.types, dtype), 1, "C", aligned=False)


def _block_of(numba: Any, width: int) -> Callable[..., Any]:
    """The stages after rounding, for elements of `width` bytes."""
    per_word, bits = 8 // width, 8 * width
    mask = (1 << bits) - 1
    element = getattr(np, f"uint{bits}")

    @numba.njit(nogil=True)
    def block(now, now_words, before, before_words, hit, start, index, old, new, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        num_words = before.size // per_word
        num_hit = np.int64(0)
        for i in range(num_words):
            hit[num_hit] = i
            num_hit += np.int64(before_words[i] != now_words[i])
        for i in range(num_hit):
            at = np.int64(hit[i])
            was = before_words[at]
            now_word = now_words[at]
            differ = was ^ now_word
            while differ != _U(0):
                place = np.int64(0)
                if per_word >= 2:
                    place += np.int64((differ & _U(0xFFFFFFFF)) == _U(0)) * (per_word // 2)
                if per_word >= 4:
                    low = differ >> _U(place * bits)
                    place += np.int64((low & _U(0xFFFF)) == _U(0)) * (per_word // 4)
                if per_word >= 8:
                    low = differ >> _U(place * bits)
                    place += np.int64((low & _U(0xFF)) == _U(0))
                shift = _U(place * bits)
                index[count] = start + at * per_word + place
                old[count] = element(was >> shift)
                new[count] = element(now_word >> shift)
                count += 1
                differ &= ~(_U(mask) << shift)
            before_words[at] = now_word
        for i in range(num_words * per_word, before.size):
            if before[i] != now[i]:
                index[count] = start + i
                old[count] = before[i]
                new[count] = now[i]
                before[i] = now[i]
                count += 1
        return count

    compiled: Callable[..., Any] = block
    return compiled


def _sweep(width: int) -> Callable[[Any], Callable[..., Any]]:
    def build(numba: Any) -> Callable[..., Any]:
        block = _block_of(numba, width)
        per_word = 8 // width

        def sweep(now, now_words, before, before_words, hit, index, old, new):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
            count = np.int64(0)
            for at in range(0, before.size, BLOCK):
                end = min(at + BLOCK, before.size)
                first, last = at // per_word, end // per_word
                count = block(
                    now[at:end],
                    now_words[first:last],
                    before[at:end],
                    before_words[first:last],
                    hit,
                    at,
                    index,
                    old,
                    new,
                    count,
                )
            return count

        types, name = numba.types, f"uint{8 * width}"
        found = [types.Array(types.int32, 1, "C"), *[types.Array(getattr(types, name), 1, "C")] * 2]
        given = [view(numba, name), view(numba, "uint64"), _writable(numba, name), _writable(numba, "uint64")]
        signature = types.int64(*given, types.Array(types.int32, 1, "C"), *found)
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(sweep)
        return compiled

    return build


def _sweep_masters(numba: Any) -> Callable[..., Any]:
    block = _block_of(numba, 2)

    def sweep(masters, nan_bits, rounded, rounded_words, before, before_words, hit, index, old, new):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        count = np.int64(0)
        for at in range(0, before.size, BLOCK):
            end = min(at + BLOCK, before.size)
            part = masters[at:end]
            out = rounded[: end - at]
            for i in range(part.size):
                bits = part[i]
                even = (bits >> np.uint32(16)) & np.uint32(1)
                nearest = np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
                is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                out[i] = np.uint16(np.uint32(nan_bits) if is_nan else nearest)
            words = rounded_words[: (end - at) // 4]
            first, last = at // 4, end // 4
            count = block(out, words, before[at:end], before_words[first:last], hit, at, index, old, new, count)
        return count

    types = numba.types
    halves, words = types.Array(types.uint16, 1, "C"), types.Array(types.uint64, 1, "C")
    signature = types.int64(
        view(numba, "uint32"),
        types.uint32,
        halves,
        words,
        _writable(numba, "uint16"),
        _writable(numba, "uint64"),
        types.Array(types.int32, 1, "C"),
        types.Array(types.int32, 1, "C"),
        halves,
        halves,
    )
    compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(sweep)
    return compiled


def _gate(numba: Any) -> Callable[..., Any]:
    def gate(index, bitmap, fresh):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = np.int64(0)
        for i in range(index.size):
            at = np.int64(index[i])
            bit = np.uint8(1 << (at & 7))
            held = bitmap[at >> 3]
            fresh[count] = i
            count += np.int64((held & bit) == 0)
            bitmap[at >> 3] = held | bit
        return count

    types = numba.types
    positions = types.Array(types.int64, 1, "C")
    bitmap = types.Array(types.uint8, 1, "C")
    signatures = [types.int64(view(numba, kind), bitmap, positions) for kind in ("int32", "int64")]
    compiled: Callable[..., Any] = numba.njit(signatures, nogil=True)(gate)
    return compiled


SWEEP = {width: Kernel(_sweep(width)) for width in (1, 2, 4, 8)}
"""By bytes per element: (now, its words, before, its words, int32 [BLOCK] scratch, index int32, old, new) -> count.
`before` becomes `now`; index, old and new have room for every element, of which there are fewer than 2^31."""
SWEEP_MASTERS = Kernel(_sweep_masters)
"""The same for fp32 bits served as bf16: (masters uint32, NaN bits, uint16 [BLOCK] scratch, its words, before, ...)."""
GATE = Kernel(_gate, 1 << 20)
"""(index, bitmap uint8, int64 [len(index)]) -> how many were not marked yet; their places; all are marked now."""
