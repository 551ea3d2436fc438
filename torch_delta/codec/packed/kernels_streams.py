"""Compiled twins of the loops between lists and streams, by element width; see `emit.py` and `gather.py`.

Cursors are int64 `[8]`, one for each of `high0, high, high_rest, mask, sign, size, size_rest, low`: bytes, numbers,
bits (mask, sign, low) or pairs of bits (size) done so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.kernels import Kernel, view
from torch_delta.format.encodings import PACKED_MASK

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDTHS = (1, 2, 4, 8)
_WORTH_COMPILING = 1 << 20
"""Changed elements: what numpy takes a quarter of a second for."""


def _emit(width: int) -> Callable[[Any], Callable[..., Any]]:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Callable[..., Any]:
        def emit(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
            counts,  # noqa: ANN001
            modes,  # noqa: ANN001
            populations,  # noqa: ANN001
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
            at = 0
            at_rest = cursors[2]
            for number in range(counts.size):
                count, mode = counts[number], modes[number]
                if count == 0:
                    continue
                if mode == PACKED_MASK:
                    bit = cursors[3] - 1
                    for i in range(at, at + count):
                        bit += np.int64(gaps[i]) + 1
                        mask[bit >> 3] |= np.uint8(1 << (bit & 7))
                    cursors[3] += populations[number]
                elif mode == 0:
                    w = cursors[0]
                    for i in range(at, at + count):
                        part = np.int64(gaps[i])
                        if part >= 255:
                            high_rest[at_rest] = np.uint64(part - 255)
                            at_rest += 1
                            part = np.int64(255)
                        high0[w] = np.uint8(part)
                        w += 1
                    cursors[0] = w
                else:
                    w = cursors[1]
                    bit = cursors[7]
                    byte, held = bit >> 3, bit & 7
                    bits = np.uint64(low[byte]) if held else np.uint64(0)
                    keep = (1 << mode) - 1
                    for i in range(at, at + count):
                        gap = np.int64(gaps[i])
                        part = gap >> mode
                        if part >= 255:
                            high_rest[at_rest] = np.uint64(part - 255)
                            at_rest += 1
                            part = np.int64(255)
                        high[w] = np.uint8(part)
                        w += 1
                        bits |= np.uint64(gap & keep) << np.uint64(held)
                        held += mode
                        while held >= 8:
                            low[byte] = np.uint8(bits & np.uint64(255))
                            bits >>= np.uint64(8)
                            byte += 1
                            held -= 8
                    if held:
                        low[byte] = np.uint8(bits & np.uint64(255))
                    cursors[1] = w
                    cursors[7] = bit + count * mode
                at += count
            cursors[2] = at_rest
            bit, pair, at_rest = cursors[4], cursors[5], cursors[6]
            top = kind(8 * width - 1)
            for i in range(steps.size):
                step = steps[i]
                negative = kind(step >> top)
                excess = kind(kind(kind(0) - step if negative != 0 else step) - kind(1))
                sign[bit >> 3] |= np.uint8(np.int64(negative) << (bit & 7))
                code = np.int64(excess) if excess < 3 else np.int64(3)
                if code == 3:
                    size_rest[at_rest] = np.uint64(excess) - np.uint64(3)
                    at_rest += 1
                size[pair >> 2] |= np.uint8(code << (2 * (pair & 3)))
                bit += 1
                pair += 1
            cursors[4], cursors[5], cursors[6] = bit, pair, at_rest

        types = numba.types
        ints, data = view(numba, "int64"), types.Array(types.uint8, 1, "C")
        rests = types.Array(types.uint64, 1, "C")
        signature = types.void(
            view(numba, "uint32"),
            view(numba, f"uint{8 * width}"),
            *[ints] * 3,
            *(data, data, rests),
            *(data, data, data, rests),
            data,
            types.Array(types.int64, 1, "C"),
        )
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(emit)
        return compiled

    return build


def _gather(width: int) -> Callable[[Any], Callable[..., Any]]:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Callable[..., Any]:
        def gather(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            counts,  # noqa: ANN001
            modes,  # noqa: ANN001
            populations,  # noqa: ANN001
            high0,  # noqa: ANN001
            high,  # noqa: ANN001
            high_rest,  # noqa: ANN001
            mask,  # noqa: ANN001
            sign,  # noqa: ANN001
            size,  # noqa: ANN001
            size_rest,  # noqa: ANN001
            low,  # noqa: ANN001
            cursors,  # noqa: ANN001
            numel,  # noqa: ANN001
            gaps,  # noqa: ANN001
            steps,  # noqa: ANN001
        ):
            # Returns 0, or 1 where something is out of range. Streams are as long as the lists need: see `gather.py`.
            at = 0
            at_rest = cursors[2]
            for number in range(counts.size):
                count, mode = counts[number], modes[number]
                if count == 0:
                    continue
                if mode == PACKED_MASK:
                    start = cursors[3]
                    last = start - 1
                    done = 0
                    for bit in range(start, start + populations[number]):
                        if (mask[bit >> 3] >> np.uint8(bit & 7)) & np.uint8(1):
                            if done == count:
                                return 1
                            gaps[at + done] = np.uint32(bit - last - 1)
                            last = bit
                            done += 1
                    if done != count:
                        return 1
                    cursors[3] = start + populations[number]
                else:
                    column = 1 if mode else 0
                    w = cursors[column]
                    bit = cursors[7]
                    byte, held = bit >> 3, np.int64(0)
                    bits = np.uint64(0)
                    if mode and bit & 7:
                        bits = np.uint64(low[byte]) >> np.uint64(bit & 7)
                        held = 8 - (bit & 7)
                        byte += 1
                    keep = np.uint64((1 << mode) - 1)
                    for i in range(at, at + count):
                        part = np.int64(high[w]) if mode else np.int64(high0[w])
                        w += 1
                        if part == 255:
                            rest = high_rest[at_rest]
                            at_rest += 1
                            if rest >= np.uint64(numel):
                                return 1
                            part += np.int64(rest)
                        while held < mode:
                            bits |= np.uint64(low[byte]) << np.uint64(held)
                            byte += 1
                            held += 8
                        gap = (part << mode) | np.int64(bits & keep)
                        bits >>= np.uint64(mode)
                        held -= mode
                        if gap >= numel:
                            return 1
                        gaps[i] = np.uint32(gap)
                    cursors[column] = w
                    cursors[7] = bit + count * mode
                at += count
            cursors[2] = at_rest
            bit, pair, at_rest = cursors[4], cursors[5], cursors[6]
            most = np.uint64(1) << np.uint64(8 * width - 1)
            for i in range(steps.size):
                code = np.uint64((size[pair >> 2] >> np.uint8(2 * (pair & 3))) & np.uint8(3))
                if code == np.uint64(3):
                    rest = size_rest[at_rest]
                    at_rest += 1
                    if rest >= most:
                        return 1
                    code += rest
                    if code >= most:
                        return 1
                step = kind(code + np.uint64(1))
                negative = (sign[bit >> 3] >> np.uint8(bit & 7)) & np.uint8(1)
                steps[i] = kind(kind(0) - step) if negative else step
                bit += 1
                pair += 1
            cursors[4], cursors[5], cursors[6] = bit, pair, at_rest
            return 0

        types = numba.types
        ints, data, rests = view(numba, "int64"), view(numba, "uint8"), view(numba, "uint64")
        signature = types.int64(
            *[ints] * 3,
            *(data, data, rests),
            *(data, data, data, rests),
            data,
            types.Array(types.int64, 1, "C"),
            types.int64,
            types.Array(types.uint32, 1, "C"),
            types.Array(getattr(types, f"uint{8 * width}"), 1, "C"),
        )
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(gather)
        return compiled

    return build


EMIT = {width: Kernel(_emit(width), _WORTH_COMPILING) for width in _WIDTHS}
"""By element width: (gaps, steps, counts, modes, populations, the eight streams, cursors)."""
GATHER = {width: Kernel(_gather(width), _WORTH_COMPILING) for width in _WIDTHS}
"""By element width: (counts, modes, populations, the eight streams, cursors, numel, gaps, steps) -> 0, or 1 if bad."""
