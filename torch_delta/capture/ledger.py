"""What was collected, what is still open, and what the digests were: the state machine behind every source.

A collect takes one record per changed unit from its keeper and files them under a token, with the digests from before.
`commit` drops the file; `rollback` gives the records back, newest token first, and restores the digests, so that the
next collect covers them together with whatever happened since.

The digest of every owned box as of the last collect is kept and moved along in O(changed). It is needed twice: a box
re-sent without its old bits still has to state how its digest changes, and a publisher proves its base with it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch_delta.capture import arrays
from torch_delta.capture.boxchanges import changes_of, slots_of
from torch_delta.capture.source import Collected, OwnedBox, Region
from torch_delta.codec.digest import digest_box
from torch_delta.errors import CaptureError
from torch_delta.format.digest import ZERO, Digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from torch_delta.capture.boxchanges import Boxed
    from torch_delta.capture.history import Record
    from torch_delta.capture.source import Bits
    from torch_delta.codec.change import Change
    from torch_delta.format.box import Box
    from torch_delta.format.schema import Schema


class Keeper(Protocol):
    """What the ledger must know of a unit's memory; see `history`."""

    def take(self, *, is_lost: bool) -> Record | None:
        """Changes since the last collect, which is now."""
        ...

    def give_back(self, record: Record) -> None:
        """Undo the newest collect not yet undone."""
        ...

    def collected(self) -> torch.Tensor | None:
        """Bits as of the last collect, in unit order; None if they are lost."""
        ...

    def region(self) -> torch.Tensor:
        """Bits as of the collect in progress, in unit order; only read, and only before the next step."""
        ...


Entry = tuple[int, "Record", dict[int, Digest]]
"""(unit, what was found, digests before by piece)."""


@dataclass(slots=True)
class _Token:
    number: int
    records: list[Entry] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


class Ledger:
    """Collect, commit, roll back over some units. Threads: any; all but `take`, `find` and `file` hold one lock.

    Args:
        schema: of the stream.
        units: of this rank; `units[i]` is remembered by `keepers[i]`.
        keepers: fresh, as of now.
    """

    def __init__(self, schema: Schema, units: Sequence[Boxed], keepers: Sequence[Keeper]) -> None:
        self._schema = schema
        self._units = tuple(units)
        self._keepers = tuple(keepers)
        self._slots = [slots_of(schema, unit) for unit in self._units]
        self._open: deque[_Token] = deque()
        self._next = 1
        self.wants_ranks = True
        """Whether changes are reduced for `packed` while the bits around them are at hand: a pass over every changed
        unit, which makes them smaller. Set between collects."""
        self.lock = threading.RLock()
        self._digests = [self._full_digests(number) for number in range(len(self._units))]
        placed = [
            (piece.tensor, piece.box.offset, number, slot)
            for number, unit in enumerate(self._units)
            for slot, piece in enumerate(unit.pieces)
        ]
        self._order = [(number, slot) for _, _, number, slot in sorted(placed)]
        pieces = (self._units[number].pieces[slot] for number, slot in self._order)
        self.owned = tuple(OwnedBox(tensor=piece.tensor, box=piece.box) for piece in pieces)
        """All boxes, ascending by (tensor, offset)."""

    def begin(self) -> None:
        """Open the next token; `take` files under it until `finish` or `abandon`."""
        self._open.append(_Token(self._next))
        self._next += 1

    def take(self, number: int, *, is_lost: bool = False) -> None:
        """Collect one unit. Several threads may take different units at a time."""
        found = self.find(number, is_lost=is_lost)
        if found is not None:
            self.file(found)

    def find(self, number: int, *, is_lost: bool = False) -> Entry | None:
        """The half of `take` that needs the weights; None if nothing changed. `file` is the other one."""
        record = self._keepers[number].take(is_lost=is_lost)
        if record is None:
            return None
        entry: Entry = (number, record, {})
        self._open[-1].records.append(entry)
        return entry

    def num_read(self, entry: Entry) -> int:
        """Elements that `file` reads for what `find` found: the changed ones, which take longest, and all to reduce."""
        number, record, _ = entry
        return 8 * record.new.numel() + (int(self._units[number].starts[-1]) if self.wants_ranks else 0)

    def file(self, entry: Entry) -> None:
        """Make changes of what `find` found; any thread, before `finish`. Needs the keeper's region."""
        number, record, before = entry
        slots, keeper, known = self._slots[number], self._keepers[number], self._digests[number]
        changes = changes_of(slots, record, known, keeper.region, reduces=self.wants_ranks)
        for slot, change in changes:
            before[slot] = known[slot]
            assert change.increment is not None
            known[slot] = known[slot] + change.increment
            self._open[-1].changes.append(change)

    def finish(self, **facts: Any) -> Collected:
        """Close the change set of the newest token.

        Args:
            **facts: further fields of `Collected`.
        """
        token = self._open[-1]
        changes, token.changes = token.changes, []
        changes.sort(key=lambda change: (change.tensor, change.box.offset))
        return Collected(
            token=token.number,
            changes=tuple(changes),
            num_changed=sum(change.count for change in changes),
            num_resent=sum(len(before) for _, record, before in token.records if record.index is None),
            **facts,
        )

    def abandon(self) -> None:
        """The collect in progress failed: as if it had not begun."""
        self._undo(self._open.pop())

    def commit(self, number: int) -> None:
        """Forget the oldest open token.

        Raises:
            CaptureError: it is not the oldest one open.
        """
        with self.lock:
            if not self._open or self._open[0].number != number:
                raise CaptureError(
                    f"token {number} is not the oldest open one ({[token.number for token in self._open]}); versions "
                    "commit in the order they were collected",
                    token=number,
                )
            self._open.popleft()

    def rollback(self, number: int) -> None:
        """Undo a token and every later one.

        Raises:
            CaptureError: it is not open.
        """
        with self.lock:
            if number not in {token.number for token in self._open}:
                raise CaptureError(f"token {number} is not open; it was committed or rolled back", token=number)
            while self._open and self._open[-1].number >= number:
                self._undo(self._open.pop())

    def regions(self) -> Iterator[Region]:
        """Bits of every owned box as of the last collect, in `owned` order."""
        held: dict[int, Bits] = {}  # fused layouts interleave units: each is read once and let go after its last box
        left = [len(unit.pieces) for unit in self._units]
        for number, slot in self._order:
            unit = self._units[number]
            bits = held[number] if number in held else held.setdefault(number, self._host_bits(number))
            piece = unit.pieces[slot]
            part = bits[unit.starts[slot] : unit.starts[slot + 1]].reshape(piece.box.shape)
            left[number] -= 1
            if not left[number]:
                del held[number]
            yield Region(tensor=piece.tensor, box=piece.box, bits=part)

    def read(self, tensor: int, box: Box) -> Bits:
        """Bits of a box inside one owned box, as of the last collect.

        Raises:
            CaptureError: no owned box contains it.
        """
        for number, slot in self._order:
            unit = self._units[number]
            piece = unit.pieces[slot]
            if piece.tensor == tensor and _contains(piece.box, box):
                bits = self._host_bits(number)[unit.starts[slot] : unit.starts[slot + 1]].reshape(piece.box.shape)
                window = tuple(
                    slice(at - start, at - start + size)
                    for at, start, size in zip(box.offset, piece.box.offset, box.shape, strict=True)
                )
                return bits[window].copy()
        name = self._schema.tensors[tensor].name
        raise CaptureError(f"{name}: box {box} is not inside a box this rank owns", tensor=name)

    def close(self) -> None:
        """Free the memory of the units; open tokens are forgotten."""
        with self.lock:
            self._open.clear()
            self._keepers = ()

    def digests(self) -> dict[int, Digest]:
        """By schema index, over this rank's boxes, as of the last collect."""
        with self.lock:
            totals: dict[int, Digest] = {}
            for unit, known in zip(self._units, self._digests, strict=True):
                for piece, digest in zip(unit.pieces, known, strict=True):
                    totals[piece.tensor] = totals.get(piece.tensor, ZERO) + digest
            return totals

    def _undo(self, token: _Token) -> None:
        for number, record, before in reversed(token.records):
            self._keepers[number].give_back(record)
            for slot, digest in before.items():
                self._digests[number][slot] = digest

    def _host_bits(self, number: int) -> Bits:
        with self.lock:
            bits = self._keepers[number].collected()
            if bits is None:
                name = self._units[number].name
                raise CaptureError(
                    f"{name}: its weights moved outside optimizer.step, so the last collected bits are gone; collect "
                    "first",
                    tensor=name,
                )
            return arrays.host(bits)

    def _full_digests(self, number: int) -> list[Digest]:
        unit, bits = self._units[number], self._host_bits(number)
        return [
            digest_box(bits[start:stop].reshape(piece.box.shape), piece.box, self._schema.tensors[piece.tensor].shape)
            for piece, start, stop in zip(unit.pieces, unit.starts[:-1], unit.starts[1:], strict=True)
        ]


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        start <= at and at + size <= start + length
        for at, size, start, length in zip(inner.offset, inner.shape, outer.offset, outer.shape, strict=True)
    )
