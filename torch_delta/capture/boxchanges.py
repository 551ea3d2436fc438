"""From what a collect found in a unit to changes of boxes of checkpoint tensors. Any thread.

Changes leave for the codec here: on the host, in box coordinates, each with what it adds to its tensor's digest, and
reduced for `packed` where the bits around it are: only what changed leaves a device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torch_delta.capture import arrays
from torch_delta.capture.packed_torch import reduce_on_device
from torch_delta.codec.bits import index_dtype
from torch_delta.codec.change import Change
from torch_delta.codec.digest import digest_box
from torch_delta.codec.packed.reduced import reduce_change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from torch_delta.capture.history import Record
    from torch_delta.capture.regions import Piece
    from torch_delta.capture.source import Bits
    from torch_delta.codec.bits import Index
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema


class Boxed(Protocol):
    """What the ledger must know of a unit; see `Unit`."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def pieces(self) -> Sequence[Piece]:
        """Boxes of checkpoint tensors, in unit order."""
        ...

    @property
    def starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Unit position of each piece's first element, and the end."""
        ...

    def current(self) -> torch.Tensor:
        """Serving bits now, in unit order; may alias the weights."""
        ...


def changes_of(
    schema: Schema,
    unit: Boxed,
    record: Record,
    known: Sequence[Digest],
    region: Callable[[], torch.Tensor],
    *,
    reduces: bool,
) -> Iterator[tuple[int, Change]]:
    """One change per piece with changes: (number of the piece, change with its increment).

    Args:
        schema: of the stream.
        unit: that was collected.
        record: what was found in it.
        known: digest of each piece before.
        region: gives the unit's bits as of the collect in progress.
        reduces: whether the changes are reduced with them, for `packed`.
    """
    new = arrays.host(record.new)
    if record.index is None or record.old is None:
        for slot, piece in enumerate(unit.pieces):
            bits = new[unit.starts[slot] : unit.starts[slot + 1]]
            shape = schema.tensors[piece.tensor].shape
            increment = digest_box(bits.reshape(piece.box.shape), piece.box, shape) - known[slot]
            yield slot, Change.resend(piece.tensor, piece.box, bits, increment)
        return
    index, old = record.index.cpu().numpy(), arrays.host(record.old)
    cuts = np.searchsorted(index, unit.starts)
    around = region() if reduces else None
    whole: Bits | None = None
    for slot in np.flatnonzero(np.diff(cuts)).tolist():
        piece = unit.pieces[slot]
        part = slice(cuts[slot], cuts[slot + 1])
        count = int(cuts[slot + 1] - cuts[slot])
        dense: Bits | None = None
        if piece.numel > count >= piece.numel * new.itemsize / (4 + new.itemsize):  # as large as positions and values
            whole = arrays.host(region()) if whole is None else whole
            dense = whole[unit.starts[slot] : unit.starts[slot + 1]].copy()
        before, after = old[part], new[part]
        change = Change(
            tensor=piece.tensor,
            box=piece.box,
            index=_box_index(index[part], int(unit.starts[slot]), piece.numel),
            old=before,
            new=after,
            dense=dense,
        )
        if around is not None:
            here = around[unit.starts[slot] : unit.starts[slot + 1]]
            dtype = schema.tensors[piece.tensor].dtype
            if record.index.device.type == "cpu":
                reduced = reduce_change(dtype, piece.box, change.index, before, after, arrays.host(here))
            else:  # only what changed crosses to the host
                positions = record.index[part] - int(unit.starts[slot])
                on_device = (positions, record.old[part], record.new[part], here.to(positions.device))
                reduced = reduce_on_device(dtype, piece.box, *on_device)
            change = replace(change, reduced=reduced)
        yield slot, change.with_digests(schema)


def _box_index(index: Index, start: int, numel: int) -> Index:
    """Positions in the unit as positions in one of its boxes; the same memory where that needs no arithmetic."""
    kind = index_dtype(numel)
    if start == 0 and index.dtype.itemsize == kind.itemsize:
        return index.view(kind)
    return (index - start).astype(kind)
