"""Compiled twins of the loops of `packed` over whole boxes. See `torch_delta.codec.kernels` for when they are compiled.

Elements are looked at in blocks of `_BLOCK`. How many of each class a block holds is counted without branches, which
compiles to vector instructions. Only blocks in which something changed are walked over, with the counters of all eight
classes in the bytes of one word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.kernels import Kernel, view

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 112  # a multiple of vector and group sizes, and below 127: counters of a block fit seven bits
_GROUP = 8
_FAR = 1 << 40
_NEVER = 127
_WIDTHS = (1, 2, 4, 8)
_U = np.uint64


def _counter(numba: Any, kind: Any) -> Callable[..., Any]:
    """Counts the elements of each class in a block."""

    def count(part, magnitude, limits, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        t1, t2, t3, t4, t5, t6, t7 = limits[1], limits[2], limits[3], limits[4], limits[5], limits[6], limits[7]
        c1 = c2 = c3 = c4 = c5 = c6 = c7 = kind(0)
        for i in range(part.size):
            size = kind(part[i] & magnitude)
            c1 = kind(c1 + kind(size > t1))
            c2 = kind(c2 + kind(size > t2))
            c3 = kind(c3 + kind(size > t3))
            c4 = kind(c4 + kind(size > t4))
            c5 = kind(c5 + kind(size > t5))
            c6 = kind(c6 + kind(size > t6))
            c7 = kind(c7 + kind(size > t7))
        out[0] = part.size - np.int64(c1)
        out[1] = np.int64(c1) - np.int64(c2)
        out[2] = np.int64(c2) - np.int64(c3)
        out[3] = np.int64(c3) - np.int64(c4)
        out[4] = np.int64(c4) - np.int64(c5)
        out[5] = np.int64(c5) - np.int64(c6)
        out[6] = np.int64(c6) - np.int64(c7)
        out[7] = np.int64(c7)

    compiled: Callable[..., Any] = numba.njit(count, nogil=True)
    return compiled


def _ordered(numba: Any, kind: Any, num_bits: int) -> Callable[..., Any]:
    def ordered(bits, sign_magnitude):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if not sign_magnitude:
            return bits
        return kind(bits ^ kind(kind(bits >> kind(num_bits - 1)) * kind((1 << (num_bits - 1)) - 1)))

    compiled: Callable[..., Any] = numba.njit(ordered, nogil=True)
    return compiled


def _types(numba: Any, width: int) -> tuple[Any, Any, Any, Any]:
    """A read-only array and a written one of elements of `width` bytes; counts; positions."""
    types = numba.types
    name = f"uint{8 * width}"
    written = types.Array(getattr(types, name), 1, "C")
    return view(numba, name), written, types.Array(types.int64, 1, "C"), types.Array(types.uint32, 1, "C")


def _rank(width: int) -> Callable[[Any], Callable[..., Any]]:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Callable[..., Any]:
        count_all, ordered = _counter(numba, kind), _ordered(numba, kind, 8 * width)

        def rank(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            region,  # noqa: ANN001
            index,  # noqa: ANN001
            old,  # noqa: ANN001
            new,  # noqa: ANN001
            limits,  # noqa: ANN001
            classes,  # noqa: ANN001
            ones,  # noqa: ANN001
            shift,  # noqa: ANN001
            magnitude,  # noqa: ANN001
            sign_magnitude,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
            counts,  # noqa: ANN001
            populations,  # noqa: ANN001
        ):
            mask, below = kind(magnitude), kind(shift)
            here = np.empty(8, np.int64)
            last = np.full(8, -1, np.int64)  # rank of the last changed element
            slot = np.empty(8, np.int64)
            for c in range(8):
                counts[c] = populations[c] = 0
            for i in range(index.size):
                counts[classes[(old[_U(i)] & mask) >> below]] += 1
            total = np.int64(0)
            for c in range(8):
                slot[c] = total
                total += counts[c]
            j = np.int64(0)
            for start in range(0, region.size, _BLOCK):
                stop = min(start + _BLOCK, region.size)
                if j == index.size or np.int64(index[_U(j)]) >= stop:
                    count_all(region[start:stop], mask, limits, here)
                    for c in range(8):
                        populations[c] += here[c]
                    continue
                seen = _U(0)
                at = np.int64(start)
                while j < index.size and np.int64(index[_U(j)]) < stop:
                    place = np.int64(index[_U(j)])
                    for i in range(at, place):
                        seen += ones[(region[_U(i)] & mask) >> below]
                    exponent = (old[_U(j)] & mask) >> below
                    c = int(classes[exponent])
                    number = populations[c] + np.int64((seen >> _U(8 * c)) & _U(255))
                    seen += ones[exponent]
                    w = slot[c]
                    slot[c] = w + 1
                    gaps[_U(w)] = np.uint32(number - last[c] - 1)
                    last[c] = number
                    steps[_U(w)] = kind(ordered(new[_U(j)], sign_magnitude) - ordered(old[_U(j)], sign_magnitude))
                    at = place + 1
                    j += 1
                for i in range(at, stop):
                    seen += ones[(region[_U(i)] & mask) >> below]
                for c in range(8):
                    populations[c] += np.int64((seen >> _U(8 * c)) & _U(255))

        types = numba.types
        read, written, ints, positions = _types(numba, width)
        signature = types.void(
            read,
            view(numba, "uint32"),
            read,
            read,
            read,
            view(numba, "uint8"),
            view(numba, "uint64"),
            types.int64,
            types.uint64,
            types.boolean,
            positions,
            written,
            ints,
            ints,
        )
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(rank)
        return compiled

    return build


def _locate(width: int) -> Callable[[Any], Callable[..., Any]]:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Callable[..., Any]:
        count_all, ordered = _counter(numba, kind), _ordered(numba, kind, 8 * width)

        def locate(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            region,  # noqa: ANN001
            limits,  # noqa: ANN001
            classes,  # noqa: ANN001
            ones,  # noqa: ANN001
            shift,  # noqa: ANN001
            magnitude,  # noqa: ANN001
            sign_magnitude,  # noqa: ANN001
            counts,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
            index,  # noqa: ANN001
            old,  # noqa: ANN001
            new,  # noqa: ANN001
            populations,  # noqa: ANN001
        ):
            mask, below = kind(magnitude), kind(shift)
            borrow = _U(0x8080808080808080)
            here = np.empty(8, np.int64)
            left = np.full(8, _FAR, np.int64)  # rank of the next changed element of a class, from the block's start on
            slot = np.empty(8, np.int64)
            ends = np.empty(8, np.int64)
            total = np.int64(0)
            for c in range(8):
                populations[c] = 0
                slot[c] = total
                total += counts[c]
                ends[c] = total
                if slot[c] < ends[c]:
                    left[c] = np.int64(gaps[_U(slot[c])])
            done = np.int64(0)
            for start in range(0, region.size, _BLOCK):
                stop = min(start + _BLOCK, region.size)
                count_all(region[start:stop], mask, limits, here)
                num_hit = np.int64(0)
                for c in range(8):
                    num_hit += np.int64(left[c] < here[c])
                if num_hit:
                    # Elements to skip in each class, a byte each; `_NEVER` is more than a block has.
                    skip = _U(0)
                    for c in range(8):
                        skip |= _U(min(left[c], _NEVER)) << _U(8 * c)
                    at = np.int64(start)
                    while at < stop:
                        until = min(at + _GROUP, stop)
                        seen = _U(0)
                        if until == at + _GROUP:
                            for i in range(_GROUP):
                                seen += ones[(region[_U(at + i)] & mask) >> below]
                            if ((skip | borrow) - seen) & borrow == borrow:
                                skip -= seen
                                at = until
                                continue
                        for i in range(at, until):
                            bits = region[_U(i)]
                            exponent = (bits & mask) >> below
                            c = int(classes[exponent])
                            if (skip >> _U(8 * c)) & _U(255):
                                skip -= ones[exponent]
                                continue
                            w = slot[c]
                            index[_U(done)] = np.uint32(i)
                            old[_U(done)] = bits
                            new[_U(done)] = ordered(kind(ordered(bits, sign_magnitude) + steps[_U(w)]), sign_magnitude)
                            done += 1
                            w += 1
                            slot[c] = w
                            gap = np.int64(gaps[_U(w)]) if w < ends[c] else _FAR
                            left[c] += 1 + gap
                            skip |= _U(min(gap, _NEVER)) << _U(8 * c)
                        at = until
                for c in range(8):
                    populations[c] += here[c]
                    left[c] -= here[c]
            return done

        types = numba.types
        read, written, ints, positions = _types(numba, width)
        signature = types.int64(
            read,
            read,
            view(numba, "uint8"),
            view(numba, "uint64"),
            types.int64,
            types.uint64,
            types.boolean,
            view(numba, "int64"),
            view(numba, "uint32"),
            read,
            positions,
            written,
            written,
            ints,
        )
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(locate)
        return compiled

    return build


RANK = {width: Kernel(_rank(width)) for width in _WIDTHS}
"""By element width: (region, index uint32, old, new, limits, classes, ones, shift, magnitude, sign_magnitude) -> gaps
uint32, steps, counts and populations int64 [8], which are passed behind the inputs."""
LOCATE = {width: Kernel(_locate(width)) for width in _WIDTHS}
"""By element width: (region, limits, classes, ones, shift, magnitude, sign_magnitude, counts, gaps, steps) -> index
uint32, old, new, populations, passed behind the inputs; returns how many elements were found."""
