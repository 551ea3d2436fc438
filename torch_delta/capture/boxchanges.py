"""From what a collect found in a unit to changes of boxes of checkpoint tensors. Any thread.

Changes leave for the codec here: on the host, in box coordinates, each with what it adds to its tensor's digest, and
reduced for `packed` where the bits around it are: only what changed leaves a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from torch_delta.capture import arrays
from torch_delta.capture.packed_torch import reduce_on_device
from torch_delta.codec.bits import index_dtype
from torch_delta.codec.change import Change
from torch_delta.codec.digest import digest_box, digest_changes
from torch_delta.codec.geometry import Layout
from torch_delta.codec.packed.reduced import reduce_change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from torch_delta.capture.history import Record
    from torch_delta.capture.regions import Piece
    from torch_delta.capture.source import Bits
    from torch_delta.codec.bits import Index
    from torch_delta.codec.packed.reduced import Reduced
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


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of a unit, with what every change of it needs, computed once."""

    number: int
    """Of the piece in its unit."""
    piece: Piece
    start: int
    """Unit position of its first element."""
    numel: int
    dtype: str
    """Safetensors spelling."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    layout: Layout
    """Of the box in the full tensor."""

    @property
    def span(self) -> slice:
        """Its elements in unit order."""
        return slice(self.start, self.start + self.numel)


def slots_of(schema: Schema, unit: Boxed) -> tuple[Slot, ...]:
    """The pieces of a unit, in unit order."""
    slots = []
    for number, (piece, start) in enumerate(zip(unit.pieces, unit.starts[:-1].tolist(), strict=True)):
        spec = schema.tensors[piece.tensor]
        layout = Layout.of(piece.box, spec.shape)
        slots.append(Slot(number, piece, start, piece.numel, spec.dtype, spec.shape, layout))
    return tuple(slots)


def changes_of(
    slots: Sequence[Slot], record: Record, known: Sequence[Digest], region: Callable[[], torch.Tensor], *, reduces: bool
) -> Iterator[tuple[int, Change]]:
    """One change per piece with changes: (number of the piece, change with its increment).

    Args:
        slots: of the unit that was collected.
        record: what was found in it.
        known: digest of each piece before.
        region: gives the unit's bits as of the collect in progress.
        reduces: whether the changes are reduced with them, for `packed`.
    """
    new = arrays.host(record.new)
    if record.index is None or record.old is None:
        for slot in slots:
            bits, piece = new[slot.span], slot.piece
            increment = digest_box(bits.reshape(piece.box.shape), piece.box, slot.shape) - known[slot.number]
            yield slot.number, Change.resend(piece.tensor, piece.box, bits, increment)
        return
    on_host = record.index if record.index.is_cpu else record.index.cpu()
    index, old = on_host.numpy(), arrays.host(record.old)
    around = region() if reduces else None
    whole: Bits | None = None
    for slot, part in _parts(slots, index):
        piece, count = slot.piece, part.stop - part.start
        dense: Bits | None = None
        if slot.numel > count >= slot.numel * new.itemsize / (4 + new.itemsize):  # as large as positions and values
            whole = arrays.host(region()) if whole is None else whole
            dense = whole[slot.span].copy()
        before, after = old[part], new[part]
        places = _box_index(index[part], slot.start, slot.numel)
        reduced: tuple[Reduced, ...] | None = None
        if around is not None and record.index.is_cpu:
            reduced = reduce_change(slot.dtype, piece.box, places, before, after, arrays.host(around[slot.span]))
        elif around is not None:  # only what changed crosses to the host
            on_device = (record.index[part] - slot.start, record.old[part], record.new[part])
            here = around[slot.span].to(record.index.device)
            reduced = reduce_on_device(slot.dtype, piece.box, *on_device, here)
        digests = digest_changes(slot.layout, places, before, after)
        yield (
            slot.number,
            Change(
                tensor=piece.tensor,
                box=piece.box,
                index=places,
                old=before,
                new=after,
                dense=dense,
                reduced=reduced,
                increment=digests[1] - digests[0],
                digests=digests,
            ),
        )


def _parts(slots: Sequence[Slot], index: Index) -> Iterator[tuple[Slot, slice]]:
    """The pieces in which something changed, each with where its positions lie in `index`."""
    if len(slots) == 1:  # nearly all units are one tensor
        if index.size:
            yield slots[0], slice(0, index.size)
        return
    starts = [slot.start for slot in slots[1:]]
    cuts = [0, *np.searchsorted(index, np.array(starts, np.int64)).tolist(), index.size]
    for slot, begin, end in zip(slots, cuts[:-1], cuts[1:], strict=True):
        if end > begin:
            yield slot, slice(begin, end)


def _box_index(index: Index, start: int, numel: int) -> Index:
    """Positions in the unit as positions in one of its boxes; the same memory where that needs no arithmetic."""
    kind = index_dtype(numel)
    if start == 0 and index.dtype.itemsize == kind.itemsize:
        return index.view(kind)
    return (index - start).astype(kind)
