"""Compiled twins of the loops from gaps to positions and new bits, for many slices in a call; see `locate.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec import lanes
from torch_delta.codec.addresses import array_at
from torch_delta.codec.compiling import Kernel, view
from torch_delta.codec.packed.kernels import array_types, make_class_masks, make_ordered
from torch_delta.codec.packed.kernels_streams import WORTH_COMPILING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

_LANES = lanes.LANES
_FAR = 1 << 40
_BLOCK = 1024  # elements whose positions and bits stay in the nearest cache
_WIDTHS = (1, 2, 4, 8)
_U = np.uint64
_PLACES = np.array(
    [
        [[place for place in range(8) if byte >> place & 1][rank : rank + 1] or [0] for rank in range(8)]
        for byte in range(256)
    ],
    np.uint8,
).reshape(-1)
"""Entry 8 * byte + n: place of the n-th bit set in a byte, from 0."""


def _select(numba: Any) -> Callable[..., Any]:
    """Place of the n-th bit set in a mask that has more than n, from 0: its byte by sums over bytes, then a table."""
    popcount = lanes.popcount(numba)

    def select(mask, rank):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        sums = mask - ((mask >> _U(1)) & _U(0x5555555555555555))
        sums = (sums & _U(0x3333333333333333)) + ((sums >> _U(2)) & _U(0x3333333333333333))
        sums = ((sums + (sums >> _U(4))) & _U(0x0F0F0F0F0F0F0F0F)) * _U(0x0101010101010101)
        tops = _U(0x8080808080808080)
        passed = ((_U(rank) * _U(0x0101010101010101) | tops) - sums) & tops
        shift = _U(8 * popcount(passed))
        before = ((sums << _U(8)) >> shift) & _U(255)
        byte = (mask >> shift) & _U(255)
        return shift + _U(_PLACES[(byte << _U(3)) + _U(rank) - before])

    compiled: Callable[..., Any] = numba.njit(select, nogil=True)
    return compiled


def _locate(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
        class_masks, ordered = make_class_masks(numba, kind), make_ordered(numba, kind, 8 * width)
        popcount, lowest, select = lanes.popcount(numba), lanes.lowest(numba), _select(numba)

        @numba.njit(nogil=True)
        def locate_slice(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            region,  # noqa: ANN001
            boundary,  # noqa: ANN001
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
            mask, below, first = kind(magnitude), kind(shift), kind(boundary)
            masks, padded = np.empty(8, np.uint64), np.zeros(_LANES, kind)
            left = np.full(8, _FAR, np.int64)  # elements of the class before its next changed one, from here on
            slot = np.empty(8, np.int64)  # of the next gap
            done_of = np.empty(8, np.int64)  # of the next step
            ends = np.empty(8, np.int64)
            total = np.int64(0)
            for c in range(8):
                populations[c] = 0
                slot[c] = done_of[c] = total
                total += counts[c]
                ends[c] = total
                if slot[c] < ends[c]:
                    left[c] = np.int64(gaps[_U(slot[c])])
            done = np.int64(0)
            for start in range(0, region.size, _LANES):
                class_masks(region, start, mask, below, first, padded, masks)
                hit = _U(0)
                for c in range(8):
                    of_class = masks[c]
                    here = popcount(of_class)
                    populations[c] += here
                    rank = left[c]
                    while rank < here:
                        hit |= _U(1) << select(of_class, rank)
                        w = slot[c] + 1
                        slot[c] = w
                        rank += 1 + (np.int64(gaps[_U(w)]) if w < ends[c] else _FAR)
                    left[c] = rank - here
                while hit:
                    i = start + lowest(hit)
                    hit &= hit - _U(1)
                    bits = region[_U(i)]
                    own = min(max(np.int64((bits & mask) >> below) - boundary, np.int64(0)), np.int64(7))
                    w = done_of[_U(own)]
                    done_of[_U(own)] = w + 1
                    index[_U(done)] = np.uint32(i)
                    old[_U(done)] = bits
                    new[_U(done)] = ordered(kind(ordered(bits, sign_magnitude) + steps[_U(w)]), sign_magnitude)
                    done += 1
            return done

        region_at = array_at(numba, f"uint{8 * width}")

        def locate(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            slices,  # noqa: ANN001
            lists,  # noqa: ANN001
            starts,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
            index,  # noqa: ANN001
            old,  # noqa: ANN001
            new,  # noqa: ANN001
            populations,  # noqa: ANN001
            found,  # noqa: ANN001
        ):
            for number in range(slices.shape[0]):
                address, numel, boundary, shift, magnitude, sign_magnitude = slices[number]
                if boundary < 0:
                    continue
                begin, end = starts[number], starts[number + 1]
                found[number] = locate_slice(
                    region_at(address, numel),
                    boundary,
                    shift,
                    magnitude,
                    sign_magnitude != 0,
                    lists[number, 0],
                    gaps[begin:end],
                    steps[begin:end],
                    index[begin:end],
                    old[begin:end],
                    new[begin:end],
                    populations[number],
                )

        return locate, [_locate_signature(numba, width)]

    return build


def _locate_flat(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
        ordered = make_ordered(numba, kind, 8 * width)

        @numba.njit(nogil=True)
        def locate_slice(region, sign_magnitude, gaps, steps, positions, old, new):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
            # Loads from all over the region wait for memory: a loop that does little else has many of them under way.
            at = np.int64(-1)
            for begin in range(0, gaps.size, _BLOCK):
                gap, place = gaps[begin : begin + _BLOCK], positions[begin : begin + _BLOCK]
                was, now, step = old[begin : begin + _BLOCK], new[begin : begin + _BLOCK], steps[begin : begin + _BLOCK]
                for i in range(gap.size):
                    at += np.int64(gap[i]) + 1
                    place[i] = np.uint32(at)
                if at >= region.size:
                    return np.int64(begin)
                for i in range(gap.size):
                    was[i] = region[_U(place[i])]
                for i in range(gap.size):
                    now[i] = ordered(kind(ordered(was[i], sign_magnitude) + step[i]), sign_magnitude)
            return np.int64(gaps.size)

        region_at = array_at(numba, f"uint{8 * width}")

        def locate_flat(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            slices,  # noqa: ANN001
            _lists,  # noqa: ANN001
            starts,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
            positions,  # noqa: ANN001
            old,  # noqa: ANN001
            new,  # noqa: ANN001
            populations,  # noqa: ANN001
            found,  # noqa: ANN001
        ):
            for number in range(slices.shape[0]):
                address, numel, boundary, _, _, sign_magnitude = slices[number]
                if boundary >= 0:
                    continue
                begin, end = starts[number], starts[number + 1]
                found[number] = locate_slice(
                    region_at(address, numel),
                    sign_magnitude != 0,
                    gaps[begin:end],
                    steps[begin:end],
                    positions[begin:end],
                    old[begin:end],
                    new[begin:end],
                )
                populations[number, 0] = numel

        return locate_flat, [_locate_signature(numba, width)]

    return build


def _locate_signature(numba: Any, width: int) -> Any:
    types = numba.types
    read, written, ints, positions = array_types(numba, width)
    return types.void(
        types.Array(types.int64, 2, "C", readonly=True, aligned=False),
        types.Array(types.int64, 3, "C", readonly=True, aligned=False),
        view(numba, "int64"),
        view(numba, "uint32"),
        read,
        positions,
        written,
        written,
        types.Array(types.int64, 2, "C"),
        ints,
    )


LOCATE = {width: Kernel(_locate(width)) for width in _WIDTHS}
"""By element width, for consecutive slices of a frame, of which those without classes are left out: (slices, lists,
starts, gaps, steps) -> positions uint32, old, new, populations, found, passed behind the inputs.

`slices` int64 [num_slices, 6] holds address and elements of the region, boundary, shift, magnitude and whether bits are
sign and magnitude; `lists` and `starts` are as for `GATHER`. `populations` [num_slices, 8] and `found` [num_slices] are
how many elements each class has, and how many were found."""
LOCATE_FLAT = {width: Kernel(_locate_flat(width), WORTH_COMPILING) for width in _WIDTHS}
"""The same for the slices without classes, which all others are left out of; counted in changed elements."""
