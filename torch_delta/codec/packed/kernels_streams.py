"""Compiled twin of the loop from lists to streams, by element width; see `emit.py`. The way back: `kernels_gather.py`.

Cursors are int64 `[8]`, one for each of `high0, high, high_rest, mask, sign, size, size_rest, low`: bytes, bits (mask,
sign, low) or pairs of bits (size) done so far.

Inner loops run over views and do for every element what nearly all need, so that LLVM turns them into vectors; numbers
that do not fit their byte or pair of bits are counted on the way, and looked for where there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.addresses import array_at
from torch_delta.codec.compiling import Kernel
from torch_delta.format.encodings import PACKED_MASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

_WIDTHS = (1, 2, 4, 8)
_CHUNK = 4096  # steps at a time, a multiple of 8: their codes stay in the first cache level
_U = np.uint64
WORTH_COMPILING = 1 << 20
"""Changed elements: what numpy takes a quarter of a second for."""
REDUCED, SIGN_MAGNITUDE, UNSIGNED = range(3)
"""How a slice is given: with its gaps and steps, or with positions and bits of floats or integers, in one class."""


def _put_varint(numba: Any) -> Callable[..., Any]:
    def put_varint(stream, at, value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        while value >= _U(128):
            stream[_U(at)] = np.uint8((value & _U(127)) | _U(128))
            value >>= _U(7)
            at += 1
        stream[_U(at)] = np.uint8(value)
        return at + 1

    compiled: Callable[..., Any] = numba.njit(put_varint, nogil=True)
    return compiled


def _mask_list(numba: Any) -> Callable[..., Any]:
    """A bit per element of the class, from bit `bit` on; the bit after the last one set."""

    def mask_list(gaps, mask, bit):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        for i in range(gaps.size):
            bit += np.int64(gaps[i])
            mask[_U(bit >> 3)] |= np.uint8(1 << (bit & 7))
            bit += 1
        return bit

    compiled: Callable[..., Any] = numba.njit(mask_list, nogil=True)
    return compiled


def _high_list(numba: Any) -> Callable[..., Any]:
    """A byte per gap, without its low bits; where `rest` is written next."""
    put_varint = _put_varint(numba)

    def high_list(gaps, shift, high, rest, at_rest):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        num_large = np.uint32(0)
        for i in range(gaps.size):
            part = np.uint32(gaps[i] >> shift)
            high[i] = np.uint8(min(part, np.uint32(255)))
            num_large += np.uint32(part >= np.uint32(255))
        for i in range(gaps.size if num_large else 0):
            if high[i] == np.uint8(255):
                at_rest = put_varint(rest, at_rest, _U(gaps[i] >> shift) - _U(255))
        return at_rest

    compiled: Callable[..., Any] = numba.njit(high_list, nogil=True)
    return compiled


def _low_list(numba: Any) -> Callable[..., Any]:
    """The low bits of gaps, from bit `bit` on; shifts are at most 22, so that 64 bits hold one and what waits."""

    def low_list(gaps, shift, low, bit):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        at, held = _U(bit >> 3), _U(bit & 7)
        bits = _U(low[at]) if held else _U(0)
        keep = (_U(1) << _U(shift)) - _U(1)
        for i in range(gaps.size):
            bits |= (_U(gaps[i]) & keep) << held
            held += _U(shift)
            if held >= _U(32):
                for number in range(4):
                    low[at + _U(number)] = np.uint8((bits >> _U(8 * number)) & _U(255))
                bits >>= _U(32)
                at += _U(4)
                held -= _U(32)
        while np.int64(held) > 0:
            low[at] = np.uint8(bits & _U(255))
            bits >>= _U(8)
            at += _U(1)
            held = held - _U(8) if held > _U(8) else _U(0)

    compiled: Callable[..., Any] = numba.njit(low_list, nogil=True)
    return compiled


def _gap_steps(numba: Any, width: int) -> Callable[..., Any]:
    """Gaps and steps of changes in one class (`reduced.reduce_gaps`); the last position."""
    kind: Any = getattr(np, f"uint{8 * width}")

    def gap_steps(positions, last, old, new, flips, gaps, steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        top = kind(8 * width - 1)
        for i in range(positions.size):
            at, before, after = positions[i], old[i], new[i]
            gaps[i] = np.uint32(at - last - np.uint32(1))
            last = at
            before = kind(before ^ kind(kind(before >> top) * flips))
            after = kind(after ^ kind(kind(after >> top) * flips))
            steps[i] = kind(after - before)
        return last

    compiled: Callable[..., Any] = numba.njit(gap_steps, nogil=True)
    return compiled


def _put_steps(numba: Any, width: int) -> Callable[..., Any]:
    """Signs and sizes of at most `_CHUNK` steps; where `rest` is written next."""
    kind: Any = getattr(np, f"uint{8 * width}")
    put_varint = _put_varint(numba)

    def put_steps(steps, sign, size, rest, bit, pair, at_rest, signs, codes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        top = kind(8 * width - 1)
        num_large = np.uint32(0)
        for i in range(steps.size):
            negative = kind(steps[i] >> top)
            excess = kind(kind(kind(steps[i] ^ kind(kind(0) - negative)) + negative) - kind(1))
            signs[i] = np.uint8(negative)
            codes[i] = np.uint8(min(excess, kind(3)))
            num_large += np.uint32(excess >= kind(3))
        for i in range(steps.size if num_large else 0):
            if codes[i] == np.uint8(3):
                negative = kind(steps[i] >> top)
                excess = kind(kind(kind(steps[i] ^ kind(kind(0) - negative)) + negative) - kind(1))
                at_rest = put_varint(rest, at_rest, _U(excess) - _U(3))
        for i in range(steps.size, (steps.size + 7) // 8 * 8):
            signs[i] = codes[i] = np.uint8(0)
        at, held = _U(bit >> 3), _U(bit & 7)
        bits = _U(sign[at]) if held else _U(0)
        at2, held2 = _U(pair >> 2), _U(2 * (pair & 3))
        bits2 = _U(size[at2]) if held2 else _U(0)
        for i in range(0, steps.size, 8):
            eight = eight2 = _U(0)
            for number in range(8):
                eight |= _U(signs[_U(i + number)]) << _U(8 * number)
                eight2 |= _U(codes[_U(i + number)]) << _U(8 * number)
            # A byte each becomes a bit each, and two bits each.
            eight = (eight * _U(0x0102040810204080)) >> _U(56)
            eight2 = (eight2 | eight2 >> _U(6)) & _U(0x000F000F000F000F)
            eight2 = (eight2 | eight2 >> _U(12)) & _U(0x000000FF000000FF)
            eight2 = (eight2 | eight2 >> _U(24)) & _U(0xFFFF)
            bits |= eight << held
            bits2 |= eight2 << held2
            here = _U(min(steps.size - i, 8))
            if here == _U(8):
                sign[at] = np.uint8(bits & _U(255))
                size[at2] = np.uint8(bits2 & _U(255))
                size[at2 + _U(1)] = np.uint8((bits2 >> _U(8)) & _U(255))
                bits >>= _U(8)
                bits2 >>= _U(16)
                at += _U(1)
                at2 += _U(2)
            else:
                held += here
                held2 += _U(2) * here
        left, left2 = np.int64(held), np.int64(held2)
        while left > 0:
            sign[at] = np.uint8(bits & _U(255))
            bits >>= _U(8)
            at += _U(1)
            left -= 8
        while left2 > 0:
            size[at2] = np.uint8(bits2 & _U(255))
            bits2 >>= _U(8)
            at2 += _U(1)
            left2 -= 8
        return at_rest

    compiled: Callable[..., Any] = numba.njit(put_steps, nogil=True)
    return compiled


def _put_list(numba: Any) -> Callable[..., Any]:
    """Gaps of one list, or of a part of it. Returns where the mask goes on; moves the other cursors."""
    mask_list, high_list, low_list = _mask_list(numba), _high_list(numba), _low_list(numba)

    def put_list(gaps, mode, high0, high, high_rest, mask, low, cursors, bit):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        if mode == PACKED_MASK:
            return mask_list(gaps, mask, bit)
        shift = np.uint32(mode)
        if mode:
            at = cursors[1]
            cursors[2] = high_list(gaps, shift, high[at : at + gaps.size], high_rest, cursors[2])
            low_list(gaps, shift, low, cursors[7])
            cursors[1] += gaps.size
            cursors[7] += gaps.size * mode
        else:
            at = cursors[0]
            cursors[2] = high_list(gaps, shift, high0[at : at + gaps.size], high_rest, cursors[2])
            cursors[0] += gaps.size
        return bit

    compiled: Callable[..., Any] = numba.njit(put_list, nogil=True)
    return compiled


def _emit(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
        put_list, put_steps, gap_steps = _put_list(numba), _put_steps(numba, width), _gap_steps(numba, width)
        words_at, bits_at = array_at(numba, "uint32"), array_at(numba, f"uint{8 * width}")

        def emit(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            sources,  # noqa: ANN001
            lists,  # noqa: ANN001
            high0,  # noqa: ANN001
            high,  # noqa: ANN001
            high_rest,  # noqa: ANN001
            mask,  # noqa: ANN001
            sign,  # noqa: ANN001
            size,  # noqa: ANN001
            size_rest,  # noqa: ANN001
            low,  # noqa: ANN001
            cursors,  # noqa: ANN001
        ):
            signs, codes = np.empty(_CHUNK, np.uint8), np.empty(_CHUNK, np.uint8)
            gaps, steps = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, kind)
            for number in range(sources.shape[0]):
                how, first, second, third = sources[number]
                done = cursors[number + 1]
                done[:] = cursors[number]
                counts, modes, populations = lists[number]
                bit = done[3]
                if how == REDUCED:
                    at = 0
                    for of_class in range(counts.size):
                        if counts[of_class] == 0:
                            continue
                        here = words_at(first + 4 * at, counts[of_class])
                        bit = put_list(here, modes[of_class], high0, high, high_rest, mask, low, done, done[3])
                        done[3] += populations[of_class]
                        at += counts[of_class]
                    every = bits_at(second, at)
                    for begin in range(0, at, _CHUNK):
                        part = every[begin : begin + _CHUNK]
                        done[6] = put_steps(part, sign, size, size_rest, done[4], done[5], done[6], signs, codes)
                        done[4] += part.size
                        done[5] += part.size
                    continue
                flips = kind((1 << (8 * width - 1)) - 1) if how == SIGN_MAGNITUDE else kind(0)
                positions, old, new = words_at(first, counts[0]), bits_at(second, counts[0]), bits_at(third, counts[0])
                last = np.uint32(0xFFFFFFFF)
                for begin in range(0, counts[0], _CHUNK):
                    where = positions[begin : begin + _CHUNK]
                    end = begin + where.size
                    gap, step = gaps[: where.size], steps[: where.size]
                    last = gap_steps(where, last, old[begin:end], new[begin:end], flips, gap, step)
                    bit = put_list(gap, modes[0], high0, high, high_rest, mask, low, done, bit)
                    done[6] = put_steps(step, sign, size, size_rest, done[4], done[5], done[6], signs, codes)
                    done[4] += where.size
                    done[5] += where.size
                done[3] += populations[0]

        types = numba.types
        signature = types.void(
            types.Array(types.int64, 2, "C"),
            types.Array(types.int64, 3, "C"),
            *[types.Array(types.uint8, 1, "C")] * 8,
            types.Array(types.int64, 2, "C"),
        )
        return emit, [signature]

    return build


EMIT = {width: Kernel(_emit(width), WORTH_COMPILING) for width in _WIDTHS}
"""By element width: (sources, lists, the eight streams, cursors), for consecutive slices of a frame.

`sources` [num_slices, 4] are rows (`REDUCED`, addresses of gaps and steps, unused) or (`SIGN_MAGNITUDE` or `UNSIGNED`,
addresses of positions, old and new bits). `lists` [num_slices, 3, num_classes] holds counts, modes and populations (0
where the mode is no mask), and `cursors` [num_slices + 1, 8] begins with those before the first slice."""
