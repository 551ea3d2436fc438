"""Compiled passes of capture on the host: compare, take what differs, and move the copy along, in one reading.

Twins of the plain path in `sweep.py`, bit for bit (tests prove it); see `torch_delta.codec.compiling` for when a kernel
is compiled and what becomes of it without numba.

Masters are rounded in blocks of `BLOCK` elements, which stay in the first cache level (vectorised). Then 64 elements at
a time are compared into one mask of 64 bits, whose bits become positions; and `SPAN` elements at a time what changed is
taken and copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torch_delta.codec import lanes
from torch_delta.codec.compiling import Kernel, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

BLOCK: Final = 4096
"""Elements per block."""
SPAN: Final = 2048
"""Elements compared before what changed in them is taken: both sides are still in the first cache level."""

_U = np.uint64


def _writable(numba: Any, dtype: str) -> Any:
    """Type of a 1-D contiguous array that is written, at any alignment."""
    return numba.types.Array(getattr(numba.types, dtype), 1, "C", aligned=False)


def _block_of(numba: Any) -> Callable[..., Any]:
    """The stages after rounding."""
    differences = lanes.differences(numba)

    @numba.njit(nogil=True)
    def block(now, before, start, index, old, new, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        whole = before.size - before.size % lanes.LANES
        for begin in range(0, whole, SPAN):
            first = count
            count = differences(now, before, begin, min(begin + SPAN, whole), start, index, count)
            for k in range(first, count):
                place = _U(index[_U(k)] - start)
                value = now[place]
                old[_U(k)] = before[place]
                new[_U(k)] = value
                before[place] = value
        for i in range(whole, before.size):
            if before[i] != now[i]:
                index[count] = start + i
                old[count] = before[i]
                new[count] = now[i]
                before[i] = now[i]
                count += 1
        return count

    compiled: Callable[..., Any] = block
    return compiled


def _sweep(width: int) -> Build:
    def build(numba: Any) -> Source:
        block = _block_of(numba)

        def sweep(now, before, index, old, new):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            return block(now, before, 0, index, old, new, np.int64(0))

        types, name = numba.types, f"uint{8 * width}"
        found = [types.Array(types.int32, 1, "C"), *[types.Array(getattr(types, name), 1, "C")] * 2]
        signature = types.int64(view(numba, name), _writable(numba, name), *found)
        return sweep, [signature]

    return build


def _sweep_masters(numba: Any) -> Source:
    block = _block_of(numba)

    def sweep(masters, nan_bits, rounded, before, index, old, new):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
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
            count = block(out, before[at:end], at, index, old, new, count)
        return count

    types = numba.types
    halves = types.Array(types.uint16, 1, "C")
    signature = types.int64(
        view(numba, "uint32"),
        types.uint32,
        halves,
        _writable(numba, "uint16"),
        types.Array(types.int32, 1, "C"),
        halves,
        halves,
    )
    return sweep, [signature]


def _gate(numba: Any) -> Source:
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
    return gate, signatures


SWEEP = {width: Kernel(_sweep(width)) for width in (1, 2, 4, 8)}
"""By bytes per element: (now, before, index int32, old, new) -> count.
`before` becomes `now`; index, old and new have room for every element, of which there are fewer than 2^31."""
SWEEP_MASTERS = Kernel(_sweep_masters)
"""The same for fp32 bits served as bf16: (masters uint32, NaN bits, uint16 [BLOCK] scratch, before, ...)."""
GATE = Kernel(_gate, 1 << 20)
"""(index, bitmap uint8, int64 [len(index)]) -> how many were not marked yet; their places; all are marked now."""
