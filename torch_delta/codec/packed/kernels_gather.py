"""Compiled twin of the loop from streams to lists, by element width; see `gather.py`.

Cursors as in `kernels_streams.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec import lanes
from torch_delta.codec.compiling import Kernel, view
from torch_delta.codec.packed.kernels_streams import WORTH_COMPILING
from torch_delta.format.encodings import PACKED_MASK

if TYPE_CHECKING:
    from torch_delta.codec.compiling import Build, Source

_WIDTHS = (1, 2, 4, 8)


def _gather(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
        popcount, lowest = lanes.popcount(numba), lanes.lowest(numba)

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
                    end = start + populations[number]
                    last = start - 1
                    done = 0
                    byte = start >> 3
                    while 8 * byte < end:
                        word = np.uint64(0)
                        if byte + 8 <= mask.size:
                            for i in range(8):
                                word |= np.uint64(mask[byte + i]) << np.uint64(8 * i)
                        else:
                            for i in range(mask.size - byte):
                                word |= np.uint64(mask[byte + i]) << np.uint64(8 * i)
                        first = 8 * byte
                        if first < start:
                            word &= ~np.uint64(0) << np.uint64(start - first)
                        if end - first < 64:
                            word &= (np.uint64(1) << np.uint64(end - first)) - np.uint64(1)
                        if popcount(word) > count - done:
                            return 1
                        while word:
                            bit = first + lowest(word)
                            word &= word - np.uint64(1)
                            gaps[at + done] = np.uint32(bit - last - 1)
                            last = bit
                            done += 1
                        byte += 8
                    if done != count:
                        return 1
                    cursors[3] = start + populations[number]
                else:
                    column = 1 if mode else 0
                    w = cursors[column]
                    bit = cursors[7]
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
                        byte = bit >> 3
                        bits = np.uint64(0)
                        if byte + 4 <= low.size:  # shifts are at most 22: four bytes hold them at any bit
                            for number_byte in range(4):
                                bits |= np.uint64(low[byte + number_byte]) << np.uint64(8 * number_byte)
                        elif mode:
                            for number_byte in range(low.size - byte):
                                bits |= np.uint64(low[byte + number_byte]) << np.uint64(8 * number_byte)
                        bits >>= np.uint64(bit & 7)
                        bit += mode
                        gap = (part << mode) | np.int64(bits & keep)
                        if gap >= numel:
                            return 1
                        gaps[i] = np.uint32(gap)
                    cursors[column] = w
                    cursors[7] = bit
                at += count
            cursors[2] = at_rest
            bit, pair, at_rest = cursors[4], cursors[5], cursors[6]
            most = np.uint64(1) << np.uint64(8 * width - 1)
            for begin in range(0, steps.size, 8):
                here = min(np.int64(8), steps.size - begin)
                byte, byte2 = bit >> 3, pair >> 2
                signs = np.uint64(sign[byte])
                if byte + 1 < sign.size:
                    signs |= np.uint64(sign[byte + 1]) << np.uint64(8)
                signs >>= np.uint64(bit & 7)
                codes = np.uint64(0)
                for number_byte in range(min(np.int64(3), size.size - byte2)):
                    codes |= np.uint64(size[byte2 + number_byte]) << np.uint64(8 * number_byte)
                codes >>= np.uint64(2 * (pair & 3))
                codes &= (np.uint64(1) << np.uint64(2 * here)) - np.uint64(1)
                if codes & (codes >> np.uint64(1)) & np.uint64(0x5555):
                    for i in range(here):
                        code = (codes >> np.uint64(2 * i)) & np.uint64(3)
                        if code == np.uint64(3):
                            rest = size_rest[at_rest]
                            at_rest += 1
                            if rest >= most:
                                return 1
                            code += rest
                            if code >= most:
                                return 1
                        step = kind(code + np.uint64(1))
                        is_negative = (signs >> np.uint64(i)) & np.uint64(1)
                        steps[begin + i] = kind(kind(0) - step) if is_negative else step
                else:
                    for i in range(here):
                        step = kind(((codes >> np.uint64(2 * i)) & np.uint64(3)) + np.uint64(1))
                        is_negative = kind((signs >> np.uint64(i)) & np.uint64(1))
                        steps[begin + i] = kind((step ^ kind(kind(0) - is_negative)) + is_negative)
                bit += here
                pair += here
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
        return gather, [signature]

    return build


GATHER = {width: Kernel(_gather(width), WORTH_COMPILING) for width in _WIDTHS}
"""By element width: (counts, modes, populations, the eight streams, cursors, numel, gaps, steps) -> 0, or 1 if bad."""
