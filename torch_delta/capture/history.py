"""How one unit remembers the bits of the last collect, and what changed since.

Two keepers, one interface. `Persistent` holds a copy of the bits as of the last collect: stepping costs nothing, a
collect compares everything, changes from anywhere are seen with their old bits. `Transient` holds nothing between
steps: it copies the bits before a step, compares after it, and adds up (position, old bits) of elements not marked as
changed yet, so that the sum over K steps is exact. When that sum outgrows a copy it becomes one. A fingerprint taken
after each step and checked before the next tells whether the weights moved in between; then the old bits are lost, the
unit is `lost`, and the next collect re-sends it whole.

Taking a collect returns a `Record`; giving the record back undoes it. Records are given back newest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from torch_delta.capture import arrays
from torch_delta.capture.marks import Marks

if TYPE_CHECKING:
    from torch_delta.capture.placement import Placement
    from torch_delta.capture.sweep import Found
    from torch_delta.capture.unit import Unit

Sparse = tuple[torch.Tensor, torch.Tensor]
"""(index, old bits)."""


class Readable(Protocol):
    """What a persistent copy must know of a unit."""

    def current(self) -> torch.Tensor:
        """Serving bits now, in unit order; may alias the weights."""
        ...

    def sweep(self, before: torch.Tensor) -> Found:
        """What differs between `before` and the bits now; `before` becomes the bits now."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """What one collect found in one unit; in unit order."""

    index: torch.Tensor | None
    """Changed positions; None: old bits unknown, every position counts as changed."""
    old: torch.Tensor | None
    new: torch.Tensor
    """New bits at `index`, or all bits when `index` is None."""


class Persistent:
    """Keeps a copy of the bits as of the last collect.

    Extra bytes: numel * itemsize for as long as it lives, plus one unit's bits while it collects.
    """

    def __init__(self, unit: Readable, placement: Placement) -> None:
        self._unit = unit
        self._copy = placement.keep(unit.current())

    def begin_step(self) -> None:
        """Nothing to do."""

    def end_step(self) -> None:
        """Nothing to do."""

    def check(self, *, is_fresh: bool) -> torch.Tensor | None:
        """Nothing to check: the copy sees everything."""

    def take(self, *, is_lost: bool) -> Record | None:
        """Changes since the last collect, which is now."""
        assert not is_lost
        index, old, new = self._unit.sweep(self._copy)
        return Record(index, old, new) if index.numel() else None

    def give_back(self, record: Record) -> None:
        """Undo the newest collect not yet undone."""
        assert record.index is not None
        assert record.old is not None
        arrays.put(self._copy, record.index, record.old)

    def collected(self) -> torch.Tensor:
        """Bits as of the last collect [numel]; do not modify."""
        return self._copy

    def region(self) -> torch.Tensor:
        """The same: a collect moves the copy along first."""
        return self._copy

    def kept_bytes(self) -> int:
        """Bytes held between steps."""
        return self._copy.numel() * self._copy.element_size()


class Transient:
    """Keeps changes only.

    Extra bytes: during a step, numel * itemsize (plus what comparing one unit takes, at most as much again); between
    steps, (index + itemsize) bytes per element changed since the last collect, at most numel * itemsize, and from the
    second step since the last collect on the marks, numel / 8 bytes. On a device the copy of the first step after a
    collect stays until the next one, and no step waits for the device: to add up there, buffers of a fixed size and
    marks would take half of that copy, and what overflows them would have to be re-sent.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._keeps_copies = unit.device.type != "cpu"
        self._sums: list[Sparse] = []
        self._marks: Marks | None = None  # of what the sums hold, once a second step adds to them
        self._dense: torch.Tensor | None = None  # all bits as of the last collect, once the sums outgrow them
        self._before: torch.Tensor | None = None  # bits before the step in progress
        self._print = arrays.fingerprint(unit.current())
        self._moved = torch.zeros((), dtype=torch.bool, device=self._print.device)
        self._is_lost = False  # known on the host already

    def begin_step(self) -> None:
        """Copy the bits; notice whether they moved since we last looked."""
        if self._before is not None:  # the previous step raised: what it did to the weights is ours to report
            self.end_step()
        if self._dense is not None or self._is_lost:
            return
        self._before = self._unit.snapshot()
        found = arrays.fingerprint(self._before)
        self._moved |= (found != self._print).any()
        self._print = found

    def end_step(self) -> None:
        """Compare with the copy and add up."""
        before, self._before = self._before, None
        if before is None:
            return
        if self._keeps_copies:
            for summed in reversed(self._sums):  # given back since; the first old value is written last
                arrays.put(before, *summed)
            self._dense = before
            self._forget_sums()
            return
        index, old, _ = self._unit.sweep(before)  # the copy becomes the present, fingerprinted without another array
        if not index.numel():
            return
        self._print = arrays.fingerprint(before)
        index, old = self._unmarked(index, old)
        if not index.numel():
            return
        per_change = index.element_size() + self._unit.itemsize
        if (self._num_summed() + index.numel()) * per_change < self._unit.numel * self._unit.itemsize:
            self._sums.append((index, old))
            return
        for summed in ((index, old), *reversed(self._sums)):  # the first old value is written last
            arrays.put(before, *summed)
        self._dense = before
        self._forget_sums()

    def check(self, *, is_fresh: bool) -> torch.Tensor | None:
        """Before a collect: a flag on the fingerprint's device that says whether old bits are lost.

        Args:
            is_fresh: the weights were just compared and nothing can have touched them since.
        """
        if self._before is not None:
            self.end_step()
            is_fresh = True
        if not is_fresh and not self._is_lost and self._dense is None:
            now = arrays.fingerprint(self._unit.current())
            self._moved |= (now != self._print).any()
        return self._moved

    def take(self, *, is_lost: bool) -> Record | None:
        """Changes since the last collect, which is now.

        Args:
            is_lost: what the flag of `check` says, read by the caller for all units at once.
        """
        record: Record | None
        if self._is_lost or is_lost:
            record = Record(None, None, self._unit.snapshot())
            self._print = arrays.fingerprint(record.new)
            self._moved.zero_()
        elif self._dense is not None:
            index, old, new = self._unit.sweep(self._dense)
            record = Record(index, old, new) if index.numel() else None
            self._print = arrays.fingerprint(self._dense)
        else:
            record = self._take_sums()
        self._is_lost, self._dense = False, None
        self._forget_sums()
        return record

    def give_back(self, record: Record) -> None:
        """Undo the newest collect not yet undone."""
        if self._is_lost:
            return
        if record.index is None:
            self._is_lost, self._dense, self._before = True, None, None
            self._forget_sums()
            return
        assert record.old is not None
        if self._dense is not None:
            arrays.put(self._dense, record.index, record.old)
            return
        self._sums.insert(0, (record.index, record.old))
        if self._marks is not None:
            self._marks.add(record.index)

    def collected(self) -> torch.Tensor | None:
        """Bits as of the last collect [numel], rebuilt from the live ones; None if they are lost."""
        if self._is_lost or bool(self.check(is_fresh=False)):
            return None
        if self._dense is not None:
            return self._dense
        bits = self._unit.snapshot()
        for summed in reversed(self._sums):
            arrays.put(bits, *summed)
        return bits

    def region(self) -> torch.Tensor:
        """Bits now [numel], between the collect and the next step; may alias the weights."""
        return self._unit.current()

    def kept_bytes(self) -> int:
        """Bytes held between steps."""
        held = [tensor for pair in self._sums for tensor in pair]
        held += [tensor for tensor in (self._dense, self._before) if tensor is not None]
        marks = self._marks.size_bytes if self._marks is not None else 0
        return marks + sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _unmarked(self, index: torch.Tensor, old: torch.Tensor) -> Sparse:
        """What of a step's changes is the first since the last collect; all are marked from now on."""
        if not self._sums:  # nothing to tell apart: no marks are needed where every step is collected
            return index, old
        if self._marks is None:
            self._marks = Marks(self._unit.numel)
            for summed, _ in self._sums:
                self._marks.add(summed)
        fresh = self._marks.add(index)
        return (index, old) if fresh.numel() == index.numel() else (index[fresh], old[fresh])

    def _num_summed(self) -> int:
        return sum(index.numel() for index, _ in self._sums)

    def _take_sums(self) -> Record | None:
        if not self._sums:
            return None
        index, old = arrays.merge_first_wins(*self._sums)  # what was given back may hold an index once more
        index, old, new = arrays.drop_equal(index, old, self._unit.take(index))
        return Record(index, old, new) if index.numel() else None

    def _forget_sums(self) -> None:
        self._sums, self._marks = [], None
