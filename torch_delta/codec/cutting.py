"""A change of a large box as changes of pieces that each fit a frame: bounded memory, and work for several threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.codec.change import Change
from torch_delta.codec.packed.pieces import Piece, cut_index, local_index, pieces
from torch_delta.format.limits import MAX_FRAME_RAW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.codec.packed.reduced import Reduced


def cut_change(change: Change) -> Iterator[Change]:
    """Changes of the pieces in which something changed; the change itself if it fits, or if its old bits are unknown.

    Arrays are views, except positions. The pieces have no increments yet.
    """
    if change.old is None or change.box.numel * change.new.itemsize <= MAX_FRAME_RAW_BYTES:
        yield change
        return
    by_start = {reduced.start: reduced for reduced in change.reduced or ()}
    cuts: Iterator[tuple[Piece, int, int]]
    if change.index is None:
        cuts = ((piece, piece.start, piece.stop) for piece in pieces(change.box, change.new.itemsize))
    else:
        cuts = cut_index(change.box, change.new.itemsize, change.index)
    for piece, begin, end in cuts:
        yield _piece(change, piece, begin, end, by_start)


def _piece(change: Change, piece: Piece, begin: int, end: int, by_start: dict[int, Reduced]) -> Change:
    assert change.old is not None
    reduced = by_start.get(piece.start)
    return Change(
        tensor=change.tensor,
        box=piece.box,
        index=None if change.index is None else local_index(change.index[begin:end], piece.start),
        old=change.old[begin:end],
        new=change.new[begin:end],
        dense=None if change.dense is None else change.dense[piece.start : piece.stop],
        reduced=None if reduced is None else (reduced,),
    )
