"""Pieces as boxes: what coverage, ownership, proofs and digests are about.

A piece is a box of its tensor, in the tensor's shape or in a finer one of the same flat order (`affine.refine`). Box
arithmetic then tells whether pieces overlap or are complete, and a piece's memory is a strided array of that shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch_delta.format.box import Box
from torch_delta.vllm.routing.affine import refine, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.vllm.routing.affine import Dim, Piece


class Placed(NamedTuple):
    """A piece as a box.

    Attributes:
        box: in the finer shape.
        strides: in the storage, one per dim of the box, in elements; 0 where the box has extent 1.
    """

    box: Box
    strides: tuple[int, ...]


def common_shape(shape: Sequence[int], dims: Sequence[tuple[Dim, ...]]) -> tuple[int, ...] | None:
    """The finer shape in which all pieces with these loops may be boxes; None if there is none."""
    return refine(shape, {dim.source for loops in dims for dim in loops})


def place(piece: Piece, shape: Sequence[int]) -> Placed | None:
    """A piece as a box of its tensor.

    Args:
        piece: to place.
        shape: the finer shape.

    Returns:
        The box and the strides of its memory; None if the piece is no box there (a run from the middle of one row to
        the middle of another).
    """
    found = split(piece.source, [(dim.size, dim.source) for dim in piece.dims], shape)
    if found is None:
        return None
    start, parts = found
    extents = [1] * len(shape)
    strides = [0] * len(shape)
    for part in parts:
        if part.step != 1 or extents[part.dim] != 1:
            return None
        extents[part.dim] = part.size
        strides[part.dim] = piece.dims[part.loop].target * part.every
    return Placed(Box(start, tuple(extents)), tuple(strides))


def targets_overlap(first: Piece, second: Piece) -> bool:
    """Whether two pieces of one storage share memory; True also where that cannot be told."""
    if first.target_end <= second.target or second.target_end <= first.target:
        return False
    extent = max(first.target_end, second.target_end)
    strides = {dim.target for piece in (first, second) for dim in piece.dims}
    # Any array length will do that the largest stride divides.
    top = max(strides, default=1)
    shape = refine((-(-extent // top) * top,), strides)
    if shape is None:
        return True
    boxes = [_target_box(piece, shape) for piece in (first, second)]
    one, other = boxes
    return one is None or other is None or one.overlaps(other)


def _target_box(piece: Piece, shape: Sequence[int]) -> Box | None:
    found = split(piece.target, [(dim.size, dim.target) for dim in piece.dims], shape)
    if found is None:
        return None
    start, parts = found
    extents = [1] * len(shape)
    for part in parts:
        if part.step != 1 or extents[part.dim] != 1:
            return None
        extents[part.dim] = part.size
    return Box(start, tuple(extents))
