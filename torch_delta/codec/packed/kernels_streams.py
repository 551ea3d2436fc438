"""Compiled twin of the loop from lists to streams, by element width; see `emit.py`. The way back: `kernels_gather.py`.

Cursors are int64 `[8]`, one for each of `high0, high, high_rest, mask, sign, size, size_rest, low`: bytes, numbers,
bits (mask, sign, low) or pairs of bits (size) done so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.compiling import Kernel, view
from torch_delta.format.encodings import PACKED_MASK

if TYPE_CHECKING:
    from torch_delta.codec.compiling import Build, Source

_WIDTHS = (1, 2, 4, 8)
WORTH_COMPILING = 1 << 20
"""Changed elements: what numpy takes a quarter of a second for."""


def _emit(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
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
                        if held >= 32:  # shifts are at most 22, so that 64 bits hold it
                            for number_byte in range(4):
                                low[byte + number_byte] = np.uint8(
                                    (bits >> np.uint64(8 * number_byte)) & np.uint64(255)
                                )
                            bits >>= np.uint64(32)
                            byte += 4
                            held -= 32
                    while held > 0:
                        low[byte] = np.uint8(bits & np.uint64(255))
                        bits >>= np.uint64(8)
                        byte += 1
                        held -= 8
                    cursors[1] = w
                    cursors[7] = bit + count * mode
                at += count
            cursors[2] = at_rest
            bit, pair, at_rest = cursors[4], cursors[5], cursors[6]
            top = kind(8 * width - 1)
            byte, held = bit >> 3, np.uint64(bit & 7)
            bits = np.uint64(sign[byte]) if held else np.uint64(0)
            byte2, held2 = pair >> 2, np.uint64(2 * (pair & 3))
            bits2 = np.uint64(size[byte2]) if held2 else np.uint64(0)
            for begin in range(0, steps.size, 8):
                here = min(np.int64(8), steps.size - begin)
                signs = codes = np.uint64(0)
                num_large = np.int64(0)
                for i in range(here):
                    step = steps[begin + i]
                    negative = kind(step >> top)
                    excess = kind(kind(kind(0) - step if negative != 0 else step) - kind(1))
                    code = np.uint64(min(excess, kind(3)))
                    num_large += np.int64(code == np.uint64(3))
                    signs |= np.uint64(negative) << np.uint64(i)
                    codes |= code << np.uint64(2 * i)
                if num_large:
                    for i in range(here):
                        step = steps[begin + i]
                        excess = kind(kind(kind(0) - step if step >> top != 0 else step) - kind(1))
                        if excess >= 3:
                            size_rest[at_rest] = np.uint64(excess) - np.uint64(3)
                            at_rest += 1
                bits |= signs << held
                bits2 |= codes << held2
                if here == 8:
                    sign[byte] = np.uint8(bits & np.uint64(255))
                    size[byte2] = np.uint8(bits2 & np.uint64(255))
                    size[byte2 + 1] = np.uint8((bits2 >> np.uint64(8)) & np.uint64(255))
                    bits >>= np.uint64(8)
                    bits2 >>= np.uint64(16)
                    byte += 1
                    byte2 += 2
                else:
                    held += np.uint64(here)
                    held2 += np.uint64(2 * here)
            left, left2 = np.int64(held), np.int64(held2)
            while left > 0:
                sign[byte] = np.uint8(bits & np.uint64(255))
                bits >>= np.uint64(8)
                byte += 1
                left -= 8
            while left2 > 0:
                size[byte2] = np.uint8(bits2 & np.uint64(255))
                bits2 >>= np.uint64(8)
                byte2 += 1
                left2 -= 8
            bit, pair = bit + steps.size, pair + steps.size
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
        return emit, [signature]

    return build


EMIT = {width: Kernel(_emit(width), WORTH_COMPILING) for width in _WIDTHS}
"""By element width: (gaps, steps, counts, modes, populations, the eight streams, cursors)."""
