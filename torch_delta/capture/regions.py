"""The boxes of checkpoint tensors that lie in a local shard, and where in it.

A checkpoint tensor is a strided view of a model tensor, a local shard is a product of runs of it. Their intersection
is again a product, so it is a few boxes (one per combination of runs), each a strided view of the local tensor. Dims
are matched one to one: dim k of the checkpoint tensor steps along one dim of the model tensor. Views that merge or
split dims are refused; no supported layout needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from torch_delta.errors import CaptureError
from torch_delta.format.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch_delta.capture.layout import View
    from torch_delta.capture.shards import Runs, Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor and the strided view of the local, row-major shard that holds it."""

    tensor: int
    """Number of the checkpoint tensor: index into `Schema.tensors` once the schema is known."""
    box: Box
    """In checkpoint coordinates; never empty."""
    offset: int
    """Of its first element in the flattened local tensor."""
    strides: tuple[int, ...]
    """In elements of the flattened local tensor, one per box dim."""

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.box.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether box row-major order is a contiguous range of the local tensor."""
        expected = 1
        for size, stride in zip(reversed(self.box.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def pieces_of(views: Mapping[int, View], shard: Shard) -> list[Piece]:
    """Intersect the views of one model tensor with this rank's shard of it.

    Args:
        views: by number of the checkpoint tensor; together they cover the full model tensor once.
        shard: what this rank holds of it.

    Returns:
        Pieces ascending by position in the local tensor; together they cover it once.
    """
    if shard.numel == 0:
        return []
    pieces = [piece for index, view in views.items() for piece in _intersect(index, view, shard)]
    covered = sum(piece.numel for piece in pieces)
    if covered != shard.numel:
        source = next(iter(views.values())).source
        raise CaptureError(
            f"{source}: its checkpoint tensors cover {covered} of the {shard.numel} local elements", tensor=source
        )
    return sorted(pieces, key=lambda piece: (piece.offset, piece.tensor))


def is_natural(pieces: Iterable[Piece]) -> bool:
    """Whether the pieces, one after the other, are the local tensor in row-major order."""
    position = 0
    for piece in pieces:
        if piece.offset != position or not piece.is_contiguous:
            return False
        position += piece.numel
    return True


def _intersect(index: int, view: View, shard: Shard) -> list[Piece]:
    steps = _match_dims(view, shard.shape)
    origin = _unravel(view.offset, shard.shape)
    local_strides = row_major(shard.local_shape)
    fixed = 0
    for dim, start in enumerate(origin):
        if dim not in {matched for matched, _ in steps if matched is not None}:
            position = _position_in(shard.runs[dim], start)
            if position is None:
                return []
            fixed += position * local_strides[dim]
    spans = []
    strides = []
    for size, (matched, step) in zip(view.shape, steps, strict=True):
        if matched is None:
            spans.append([(0, size, 0)])
            strides.append(0)
            continue
        stride = local_strides[matched]
        cut = _cut(shard.runs[matched], origin[matched], step, size)
        spans.append([(first, length, position * stride) for first, length, position in cut])
        strides.append(step * stride)
    return [
        Piece(
            tensor=index,
            box=Box(offset=tuple(first for first, _, _ in combo), shape=tuple(length for _, length, _ in combo)),
            offset=fixed + sum(position for _, _, position in combo),
            strides=tuple(strides),
        )
        for combo in product(*spans)
    ]


def _match_dims(view: View, shape: tuple[int, ...]) -> list[tuple[int | None, int]]:
    """For each dim of the view: (dim of the model tensor it steps along, step); None for dims of size 1."""
    strides = row_major(shape)
    origin = _unravel(view.offset, shape)
    matches: list[tuple[int | None, int]] = []
    used: set[int] = set()
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1:
            matches.append((None, 0))
            continue
        dim = next((d for d, s in enumerate(strides) if shape[d] > 1 and s <= stride), None)
        step = 0 if dim is None else stride // strides[dim]
        fits = dim is not None and stride == step * strides[dim] and origin[dim] + step * (size - 1) < shape[dim]
        if dim is None or not fits or dim in used:
            raise CaptureError(
                f"{view.source}: a checkpoint tensor of shape {view.shape} merges or splits dims of the model's "
                f"{shape} (offset {view.offset}, strides {view.strides}); this layout is not supported",
                tensor=view.source,
            )
        used.add(dim)
        matches.append((dim, step))
    return matches


def _cut(runs: Runs, start: int, step: int, size: int) -> list[tuple[int, int, int]]:
    """Indices i < size with start + step * i inside the runs: (first i, length, local position of the first)."""
    found = []
    position = 0
    for first, length in runs:
        low = max(0, -((start - first) // step))
        high = min(size, (first + length - 1 - start) // step + 1)
        if low < high:
            found.append((low, high - low, position + start + step * low - first))
        position += length
    return found


def _position_in(runs: Runs, value: int) -> int | None:
    position = 0
    for first, length in runs:
        if first <= value < first + length:
            return position + value - first
        position += length
    return None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(flat // stride % max(size, 1) for size, stride in zip(shape, row_major(shape), strict=True))
