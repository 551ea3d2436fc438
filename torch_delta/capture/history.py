"""How one unit remembers the bits of the last collect, and what changed since.

Two keepers, one interface. `Persistent` holds a copy of the bits as of the last collect: stepping costs nothing, a
collect compares everything, changes from anywhere are seen with their old bits. `Transient` holds nothing between
steps: it copies the bits before a step, compares after it, and adds up (position, old bits) with the first old value
winning, so that the sum over K steps is exact. When that sum outgrows a copy it becomes one. A fingerprint taken after
each step and checked before the next tells whether the weights moved in between; then the old bits are lost, the unit
is `lost`, and the next collect re-sends it whole.

Taking a collect returns a `Record`; giving the record back undoes it. Records are given back newest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from torch_delta.capture import arrays

if TYPE_CHECKING:
    from torch_delta.capture.placement import Placement
    from torch_delta.capture.unit import Unit

Sparse = tuple[torch.Tensor, torch.Tensor]
"""(index, old bits)."""


class Readable(Protocol):
    """What a persistent copy must know of a unit."""

    def current(self) -> torch.Tensor:
        """Serving bits now, in unit order; may alias the weights."""
        ...

    def compare(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions where they differ from `before`, and the bits there."""
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
        index, new = self._unit.compare(self._copy)
        if not index.numel():
            return None
        record = Record(index, arrays.take(self._copy, index), new)
        arrays.put(self._copy, index, new)
        return record

    def give_back(self, record: Record) -> None:
        """Undo the newest collect not yet undone."""
        assert record.index is not None
        assert record.old is not None
        arrays.put(self._copy, record.index, record.old)

    def collected(self) -> torch.Tensor:
        """Bits as of the last collect [numel]; do not modify."""
        return self._copy

    def kept_bytes(self) -> int:
        """Bytes held between steps."""
        return self._copy.numel() * self._copy.element_size()


class Transient:
    """Keeps changes only.

    Extra bytes: during a step, numel * itemsize (plus what comparing one unit takes, at most as much again); between
    steps, (index + itemsize) bytes per element changed since the last collect, at most numel * itemsize.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._sums: list[Sparse] = []
        self._num_summed = 0
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
        index, new = self._unit.compare(before)
        if not index.numel():
            return
        old = arrays.take(before, index)
        arrays.put(before, index, new)  # the copy becomes the present, to be fingerprinted without another array
        self._print = arrays.fingerprint(before)
        per_change = index.element_size() + self._unit.itemsize
        if (self._num_summed + index.numel()) * per_change < self._unit.numel * self._unit.itemsize:
            self._add(index, old)
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
            index, new = self._unit.compare(self._dense)
            record = Record(index, arrays.take(self._dense, index), new) if index.numel() else None
            arrays.put(self._dense, index, new)
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
        self._num_summed += record.index.numel()

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

    def kept_bytes(self) -> int:
        """Bytes held between steps."""
        held = [tensor for pair in self._sums for tensor in pair]
        held += [tensor for tensor in (self._dense, self._before) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _add(self, index: torch.Tensor, old: torch.Tensor) -> None:
        """Append, and merge sums of similar size so that duplicates cannot pile up: amortised O(log) per change."""
        self._sums.append((index, old))
        while len(self._sums) > 1 and self._sums[-1][0].numel() * 2 >= self._sums[-2][0].numel():
            later = self._sums.pop()
            self._sums.append(arrays.merge_first_wins(self._sums.pop(), later))
        self._num_summed = sum(pair[0].numel() for pair in self._sums)

    def _take_sums(self) -> Record | None:
        while len(self._sums) > 1:
            later = self._sums.pop()
            self._sums.append(arrays.merge_first_wins(self._sums.pop(), later))
        if not self._sums:
            return None
        index, old = self._sums[0]
        index, old, new = arrays.drop_equal(index, old, self._unit.take(index))
        return Record(index, old, new) if index.numel() else None

    def _forget_sums(self) -> None:
        self._sums, self._num_summed = [], 0
