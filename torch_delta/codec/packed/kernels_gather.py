"""Compiled twins of the loops from streams to lists, by element width; see `gather.py`.

Cursors as in `kernels_streams.py`. Inner loops run over views and write a block at a time, without a branch for what is
rare (a number that does not fit its byte or pair of bits): LLVM turns them into vectors. What is rare follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec import lanes
from torch_delta.codec.compiling import Kernel, view
from torch_delta.codec.packed.kernels_streams import WORTH_COMPILING
from torch_delta.format.encodings import PACKED_MASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

_WIDTHS = (1, 2, 4, 8)
_U = np.uint64
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_BLOCK = 16  # steps at a time: their codes and where they begin in a byte fit a word
_BAD = -1


def _word(numba: Any) -> Callable[..., Any]:
    """Eight bytes from a place on as a number, zero behind the end."""

    def word(data, byte):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        found = _U(0)
        at = _U(byte)
        if byte + 8 <= data.size:
            for i in range(8):
                found |= _U(data[at + _U(i)]) << _U(8 * i)
        else:
            for i in range(data.size - byte):
                found |= _U(data[at + _U(i)]) << _U(8 * i)
        return found

    compiled: Callable[..., Any] = numba.njit(word, nogil=True)
    return compiled


def _mask_list(numba: Any) -> Callable[..., Any]:
    """Gaps of a list that is a bit per element; whether the mask has as many ones."""
    popcount, lowest, word = lanes.popcount(numba), lanes.lowest(numba), _word(numba)

    def mask_list(mask, start, population, gaps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        end = start + population
        last = start - 1
        done = np.int64(0)
        for first in range(start & ~7, end, 64):
            bits = word(mask, first >> 3)
            if first < start:
                bits &= _ALL << _U(start - first)
            if end - first < 64:
                bits &= (_U(1) << _U(end - first)) - _U(1)
            if popcount(bits) > gaps.size - done:
                return False
            while bits:
                bit = first + lowest(bits)
                bits &= bits - _U(1)
                gaps[_U(done)] = np.uint32(bit - last - 1)
                last = bit
                done += 1
        return done == gaps.size

    compiled: Callable[..., Any] = numba.njit(mask_list, nogil=True)
    return compiled


def _byte_list(numba: Any) -> Callable[..., Any]:
    """Gaps of a list with shift 0; how many numbers of `rest` it took, or `_BAD`."""

    def byte_list(high, rest, numel, gaps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        most = np.uint8(0)
        for i in range(gaps.size):
            part = high[i]
            gaps[i] = part
            most = max(most, part)
        num_rests = np.int64(0)
        if most < 255:
            return num_rests if np.int64(most) < numel else np.int64(_BAD)
        for i in range(gaps.size):
            if high[i] == 255:
                more = rest[_U(num_rests)]
                num_rests += 1
                if more >= _U(numel) or np.int64(more) + 255 >= numel:
                    return np.int64(_BAD)
                gaps[i] = np.uint32(np.int64(more) + 255)
        return num_rests

    compiled: Callable[..., Any] = numba.njit(byte_list, nogil=True)
    return compiled


def _shifted_list(numba: Any) -> Callable[..., Any]:
    """Gaps of a list with a shift; how many numbers of `rest` it took, or `_BAD`."""
    word = _word(numba)

    def shifted_list(high, rest, low, bit, shift, numel, gaps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        keep = (_U(1) << _U(shift)) - _U(1)
        num_whole = min(gaps.size, max(np.int64(0), (8 * low.size - 64 - bit) // shift))
        most = _U(0)
        for i in range(num_whole):
            at = _U(bit + i * shift)
            byte = at >> _U(3)
            bits = _U(0)
            for place in range(4):  # shifts are at most 22: four bytes hold them at any bit
                bits |= _U(low[byte + _U(place)]) << _U(8 * place)
            gap = _U(high[i]) << _U(shift) | ((bits >> (at & _U(7))) & keep)
            gaps[i] = np.uint32(gap)
            most = max(most, gap)
        for i in range(num_whole, gaps.size):
            at = bit + i * shift
            gap = _U(high[i]) << _U(shift) | ((word(low, at >> 3) >> _U(at & 7)) & keep)
            gaps[i] = np.uint32(gap)
            most = max(most, gap)
        num_rests = np.int64(0)
        if most >= _U(255 << shift):
            for i in range(gaps.size):
                if high[i] == 255:
                    more = rest[_U(num_rests)]
                    num_rests += 1
                    if more >= _U(numel) or (more << _U(shift)) + _U(gaps[i]) >= _U(numel):
                        return np.int64(_BAD)
                    gaps[i] += np.uint32(more << _U(shift))
        if most >= _U(numel):
            return np.int64(_BAD)
        return num_rests

    compiled: Callable[..., Any] = numba.njit(shifted_list, nogil=True)
    return compiled


def _unpack_steps(numba: Any, width: int) -> Callable[..., Any]:
    """Steps of a slice; how many numbers of `rest` they took, or `_BAD`."""
    kind: Any = getattr(np, f"uint{8 * width}")
    wide: Any = np.uint64 if width == 8 else np.uint32
    word, lowest = _word(numba), lanes.lowest(numba)

    def unpack_steps(sign, size, rest, bit, pair, steps):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        most = _U(1) << _U(8 * width - 1)
        num_rests = np.int64(0)
        for begin in range(0, steps.size, _BLOCK):
            signs = wide((word(sign, bit >> 3) >> _U(bit & 7)) & _U(0xFFFF))
            codes = wide((word(size, pair >> 2) >> _U(2 * (pair & 3))) & _U(0xFFFFFFFF))
            block = steps[begin : begin + _BLOCK]
            if block.size == _BLOCK:
                for i in range(_BLOCK):
                    step = wide(((codes >> wide(2 * i)) & wide(3)) + wide(1))
                    negative = wide((signs >> wide(i)) & wide(1))
                    block[i] = kind(wide(step ^ wide(wide(0) - negative)) + negative)
            else:
                for i in range(block.size):
                    step = wide(((codes >> wide(2 * i)) & wide(3)) + wide(1))
                    negative = wide((signs >> wide(i)) & wide(1))
                    block[i] = kind(wide(step ^ wide(wide(0) - negative)) + negative)
                codes = wide(codes & ((_U(1) << _U(2 * block.size)) - _U(1)))
            large = _U(codes) & (_U(codes) >> _U(1)) & _U(0x55555555)
            while large:
                i = lowest(large) >> 1
                large &= large - _U(1)
                more = rest[_U(num_rests)]
                num_rests += 1
                if more >= most or more + _U(3) >= most:
                    return np.int64(_BAD)
                step = kind(more + _U(4))
                block[_U(i)] = kind(kind(0) - step) if (_U(signs) >> _U(i)) & _U(1) else step
            bit += _BLOCK
            pair += _BLOCK
        return num_rests

    compiled: Callable[..., Any] = numba.njit(unpack_steps, nogil=True)
    return compiled


def _gather(width: int) -> Build:
    def build(numba: Any) -> Source:
        mask_list, byte_list, shifted_list = _mask_list(numba), _byte_list(numba), _shifted_list(numba)
        unpack_steps = _unpack_steps(numba, width)

        def gather(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
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
            numels,  # noqa: ANN001
            starts,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
        ):
            # Returns 0, or 1 where something is out of range. Streams are as long as the lists need: see `gather.py`.
            for number in range(numels.size):
                numel, at = numels[number], starts[number]
                for of_class in range(lists.shape[2]):
                    count, mode = lists[number, 0, of_class], lists[number, 1, of_class]
                    if count == 0:
                        continue
                    here, rest = gaps[at : at + count], high_rest[cursors[2] :]
                    if mode == PACKED_MASK:
                        population = lists[number, 2, of_class]
                        if not mask_list(mask, cursors[3], population, here):
                            return 1
                        cursors[3] += population
                    elif mode == 0:
                        taken = byte_list(high0[cursors[0] : cursors[0] + count], rest, numel, here)
                        if taken == _BAD:
                            return 1
                        cursors[0] += count
                        cursors[2] += taken
                    else:
                        taken = shifted_list(
                            high[cursors[1] : cursors[1] + count], rest, low, cursors[7], mode, numel, here
                        )
                        if taken == _BAD:
                            return 1
                        cursors[1] += count
                        cursors[2] += taken
                        cursors[7] += count * mode
                    at += count
                count = starts[number + 1] - starts[number]
                here = steps[starts[number] : starts[number + 1]]
                taken = unpack_steps(sign, size, size_rest[cursors[6] :], cursors[4], cursors[5], here)
                if taken == _BAD:
                    return 1
                cursors[4] += count
                cursors[5] += count
                cursors[6] += taken
            return 0

        types = numba.types
        ints, data, rests = view(numba, "int64"), view(numba, "uint8"), view(numba, "uint64")
        signature = types.int64(
            types.Array(types.int64, 3, "C", readonly=True, aligned=False),
            *(data, data, rests),
            *(data, data, data, rests),
            data,
            types.Array(types.int64, 1, "C"),
            *(ints, ints),
            types.Array(types.uint32, 1, "C"),
            types.Array(getattr(types, f"uint{8 * width}"), 1, "C"),
        )
        return gather, [signature]

    return build


def _varints(numba: Any) -> Source:
    def varints(data, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        count = np.int64(0)
        value = shift = _U(0)
        for i in range(data.size):
            byte = _U(data[i])
            value |= (byte & _U(127)) << shift
            if byte < _U(128):
                if byte == _U(0) and shift != _U(0):
                    return np.int64(_BAD)
                out[_U(count)] = value
                count += 1
                value = shift = _U(0)
            else:
                shift += _U(7)
                if shift > _U(56):
                    return np.int64(_BAD)
        return count if shift == _U(0) else np.int64(_BAD)

    types = numba.types
    return varints, [types.int64(view(numba, "uint8"), types.Array(types.uint64, 1, "C"))]


GATHER = {width: Kernel(_gather(width), WORTH_COMPILING) for width in _WIDTHS}
"""By element width: (lists, the eight streams, cursors, numels, starts, gaps, steps) -> 0, or 1 if something is out of
range, for consecutive slices of a frame.

`lists` [num_slices, 3, num_classes] holds counts, modes and populations, `starts` [num_slices + 1] cuts gaps and steps,
`numels` [num_slices] are the elements of the boxes."""
VARINTS = Kernel(_varints, WORTH_COMPILING)
"""(bytes, values uint64 [bytes]) -> how many numbers there are, or -1 where rule E9 is broken."""
