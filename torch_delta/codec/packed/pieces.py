"""Cutting boxes into pieces that fit a frame: each follows the one before it in the row-major order of the box."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import blocks
from torch_delta.format.box import Box
from torch_delta.format.limits import MAX_FRAME_RAW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.codec.bits import Index


class Piece(NamedTuple):
    """Part of a box.

    Attributes:
        box: in full-tensor coordinates.
        start: place of its first element in the box it was cut from, row-major.
    """

    box: Box
    start: int

    @property
    def stop(self) -> int:
        """Place after its last element."""
        return self.start + self.box.numel


def pieces(box: Box, itemsize: int) -> Iterator[Piece]:
    """Pieces of at most `MAX_FRAME_RAW_BYTES`, together the whole box; the box itself if it is no larger."""
    most = MAX_FRAME_RAW_BYTES // itemsize
    if box.numel <= most:
        yield Piece(box, 0)
        return
    start = 0
    for where in blocks(box.shape, most):
        begins = [part.start for part in where] + [0] * (len(box.shape) - len(where))
        ends = [min(part.stop, extent) for part, extent in zip(where, box.shape, strict=False)]
        shape = (*(end - begin for begin, end in zip(begins, ends, strict=False)), *box.shape[len(where) :])
        piece = Piece(Box(tuple(at + begin for at, begin in zip(box.offset, begins, strict=True)), shape), start)
        yield piece
        start = piece.stop


def cut_index(box: Box, itemsize: int, positions: Index) -> Iterator[tuple[Piece, int, int]]:
    """The pieces of a box in which something changed, each with where its positions begin and end.

    Args:
        box: to be cut.
        itemsize: bytes per element.
        positions: box-local, strictly increasing.
    """
    for piece in pieces(box, itemsize):
        begin, end = np.searchsorted(positions, (piece.start, piece.stop)).tolist()
        if end > begin:
            yield piece, begin, end


def local_index(positions: Index, start: int) -> npt.NDArray[np.uint32]:
    """Positions relative to the start of a piece."""
    if not start:
        return np.ascontiguousarray(positions, np.uint32)
    return (positions - positions.dtype.type(start)).astype(np.uint32)
