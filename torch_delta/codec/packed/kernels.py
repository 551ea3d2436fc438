"""Compiled twin of the loop from positions to ranks, and what it shares with the way back (`kernels_locate.py`).

Sixty-four elements at a time become eight masks, one for each class, with a bit for every element of it (`lanes.py`).
How many elements of a class lie before a place is then a count of bits, and the place of the n-th of them a search for
a bit: work per 64 elements and per changed element, none per element. See `torch_delta.codec.compiling` for when that
happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec import lanes
from torch_delta.codec.compiling import Kernel, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

_LANES = lanes.LANES
_WIDTHS = (1, 2, 4, 8)
_U = np.uint64
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def make_ordered(numba: Any, kind: Any, num_bits: int) -> Callable[..., Any]:
    """(bits, whether they are sign and magnitude) -> the same in the order of the values; see `steps.ordered`."""

    def ordered(bits, sign_magnitude):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if not sign_magnitude:
            return bits
        return kind(bits ^ kind(kind(bits >> kind(num_bits - 1)) * kind((1 << (num_bits - 1)) - 1)))

    compiled: Callable[..., Any] = numba.njit(ordered, nogil=True)
    return compiled


def make_class_masks(numba: Any, kind: Any) -> Callable[..., Any]:
    """(region, start, magnitude, shift, boundary, scratch, masks): the masks of the classes of up to 64 elements."""
    planes = lanes.class_planes(numba)

    def class_masks(region, start, magnitude, shift, boundary, padded, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        left = region.size - start
        if left >= _LANES:
            keep = _ALL
            p0, p1, p2 = planes(region, start, magnitude, shift, boundary)
        else:
            keep = (_U(1) << _U(left)) - _U(1)
            for i in range(left):
                padded[i] = kind(region[_U(start + i)])
            p0, p1, p2 = planes(padded, 0, magnitude, shift, boundary)
        low, high = keep & ~p2, keep & p2
        out[0] = low & ~p1 & ~p0
        out[1] = low & ~p1 & p0
        out[2] = low & p1 & ~p0
        out[3] = low & p1 & p0
        out[4] = high & ~p1 & ~p0
        out[5] = high & ~p1 & p0
        out[6] = high & p1 & ~p0
        out[7] = high & p1 & p0

    compiled: Callable[..., Any] = numba.njit(class_masks, nogil=True)
    return compiled


def array_types(numba: Any, width: int) -> tuple[Any, Any, Any, Any]:
    """A read-only array and a written one of elements of `width` bytes; counts; positions."""
    types = numba.types
    name = f"uint{8 * width}"
    written = types.Array(getattr(types, name), 1, "C")
    return view(numba, name), written, types.Array(types.int64, 1, "C"), types.Array(types.uint32, 1, "C")


def _rank(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
        class_masks, ordered = make_class_masks(numba, kind), make_ordered(numba, kind, 8 * width)
        popcount = lanes.popcount(numba)

        def rank(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            region,  # noqa: ANN001
            index,  # noqa: ANN001
            old,  # noqa: ANN001
            new,  # noqa: ANN001
            classes,  # noqa: ANN001
            boundary,  # noqa: ANN001
            shift,  # noqa: ANN001
            magnitude,  # noqa: ANN001
            sign_magnitude,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
            counts,  # noqa: ANN001
            populations,  # noqa: ANN001
        ):
            mask, below, first = kind(magnitude), kind(shift), kind(boundary)
            masks, padded = np.empty(8, np.uint64), np.zeros(_LANES, kind)
            unchanged = np.zeros(8, np.int64)  # elements of the class up to here that did not change
            last = np.zeros(8, np.int64)  # the same at its last changed element
            slot = np.empty(8, np.int64)
            for c in range(8):
                counts[c] = 0
            for i in range(index.size):
                counts[classes[(old[_U(i)] & mask) >> below]] += 1
            total = np.int64(0)
            for c in range(8):
                slot[c] = total
                total += counts[c]
            j = np.int64(0)
            for start in range(0, region.size, _LANES):
                class_masks(region, start, mask, below, first, padded, masks)
                begin = j
                changed = _U(0)
                while j < index.size and np.int64(index[_U(j)]) < start + _LANES:
                    changed |= _U(1) << _U(np.int64(index[_U(j)]) - start)
                    j += 1
                if changed:
                    for c in range(8):
                        masks[c] &= ~changed
                    for i in range(begin, j):
                        own = np.int64(classes[(old[_U(i)] & mask) >> below])
                        before = (_U(1) << _U(np.int64(index[_U(i)]) - start)) - _U(1)
                        number = unchanged[own] + popcount(masks[own] & before)
                        w = slot[own]
                        slot[own] = w + 1
                        gaps[_U(w)] = np.uint32(number - last[own])
                        last[own] = number
                        steps[_U(w)] = kind(ordered(new[_U(i)], sign_magnitude) - ordered(old[_U(i)], sign_magnitude))
                for c in range(8):
                    unchanged[c] += popcount(masks[c])
            for c in range(8):
                populations[c] = unchanged[c] + counts[c]

        types = numba.types
        read, written, ints, positions = array_types(numba, width)
        signature = types.void(
            read,
            view(numba, "uint32"),
            read,
            read,
            view(numba, "uint8"),
            types.int64,
            types.int64,
            types.uint64,
            types.boolean,
            positions,
            written,
            ints,
            ints,
        )
        return rank, [signature]

    return build


RANK = {width: Kernel(_rank(width)) for width in _WIDTHS}
"""By element width: (region, index uint32, old, new, classes, boundary, shift, magnitude, sign_magnitude) -> gaps
uint32, steps, counts and populations int64 [8], which are passed behind the inputs."""
