"""Full passes over the live parameters: the proof against the base, and digests in checkpoint coordinates.

Both walk route by route in pieces of a few MiB, may be cancelled between two of them, and hold the GIL only there.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from torch_delta.codec.bits import blocks
from torch_delta.codec.digest import digest_box
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO, Digest
from torch_delta.vllm.routing.affine import row_major

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_delta.codec.bits import Bits
    from torch_delta.format.schema import TensorSpec
    from torch_delta.vllm.routing.reach import Route

_CHUNK_ELEMENTS = 1 << 20


def _chunks(route: Route) -> Iterator[tuple[Box, Bits]]:
    """The live bits of a route, in sub-boxes of its box."""
    if not route.box.shape:
        yield route.box, route.storage.view(route.piece.target, (), ())
        return
    for where in blocks(route.box.shape, _CHUNK_ELEMENTS):
        first = [part.start for part in where] + [0] * (len(route.box.shape) - len(where))
        extents = [min(part.stop, extent) - part.start for part, extent in zip(where, route.box.shape, strict=False)]
        shape = (*extents, *route.box.shape[len(where) :])
        offset = route.piece.target + sum(at * stride for at, stride in zip(first, route.strides, strict=True))
        box = Box(tuple(at + more for at, more in zip(route.box.offset, first, strict=True)), shape)
        yield box, route.storage.view(offset, shape, route.strides)


def digest_route(route: Route, stopped: Callable[[], bool]) -> Digest | None:
    """Digest of a route's live bits, as its share of the tensor's digest; None if stopped."""
    total = ZERO
    for box, live in _chunks(route):
        if stopped():
            return None
        total += digest_box(live, box, route.shape)
    return total


def count_differences(
    spec: TensorSpec, route: Route, read: Callable[[Box], Bits], stopped: Callable[[], bool]
) -> int | None:
    """Elements of a route whose live bits are not those of the checkpoint; None if stopped.

    Args:
        spec: of the tensor.
        route: of that tensor.
        read: bits of a box of the tensor, of the box's shape.
        stopped: asked between chunks.
    """
    differing = 0
    for box, live in _chunks(route):
        if stopped():
            return None
        expected = read(box) if route.shape == spec.shape else _read_finer(spec, route.shape, box, read)
        differing += int(np.count_nonzero(live != expected))
    return differing


def _read_finer(spec: TensorSpec, finer: Sequence[int], box: Box, read: Callable[[Box], Bits]) -> Bits:
    """Read a box that is one only in a finer shape, by way of the rows of the tensor that hold it."""
    strides = row_major(finer)
    first = sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
    end = first + sum((extent - 1) * stride for extent, stride in zip(box.shape, strides, strict=True)) + 1
    if not spec.shape:
        return read(Box((), ())).reshape(box.shape)
    row = prod(spec.shape[1:])
    top, bottom = first // row, -(-end // row)
    rows = Box((top, *(0 for _ in spec.shape[1:])), (bottom - top, *spec.shape[1:]))
    flat = np.ascontiguousarray(read(rows)).reshape(-1)[first - top * row :]
    in_bytes = tuple(stride * flat.itemsize for stride in strides)
    found: Bits = np.lib.stride_tricks.as_strided(flat, box.shape, in_bytes, writeable=False)
    return found
