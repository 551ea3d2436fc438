"""How many bytes a capture takes, as formulas."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING

from torch_delta.capture.crew import num_threads
from torch_delta.capture.history import Persistent, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.capture.unit import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraBytes:
    """Memory capture takes on this rank, next to weights and optimizer state. Itemsizes are of the serving dtype."""

    persistent: int
    """Snapshots held between steps: sum of numel * itemsize over units kept in persistent mode (all owned shards in
    persistent mode; owned buffers in transient mode)."""
    in_step: int
    """Peak during `optimizer.step` in transient mode: sum of numel * itemsize over owned trained shards, plus the
    largest of them once more, one per thread (on the host as many as torch has). 0 in persistent mode."""
    in_collect: int
    """Peak during `collect` in persistent mode, besides the changes found: numel * itemsize of the largest units, one
    per thread. What the compiled passes sweep takes less: it is not cast first."""
    accumulated: int
    """Held now for changes not yet collected (transient mode): (index + itemsize) bytes per changed element, with
    4-byte indices up to 2^31 elements per shard; at most numel * itemsize per shard. From the second step since a
    collect on also marks, numel / 8 bytes per changed shard. On a device numel * itemsize from the first step after a
    collect to the next collect."""


def extra_bytes(units: Sequence[Unit], keepers: Sequence[Persistent | Transient]) -> ExtraBytes:
    """Evaluate the formulas of `ExtraBytes` for the units of one rank; `keepers` is empty once closed."""
    persistent, stepped, accumulated = [], [], 0
    for unit, keeper in zip(units, keepers, strict=False):
        size = unit.numel * unit.itemsize
        if isinstance(keeper, Persistent):
            persistent.append(size)
        else:
            accumulated += keeper.kept_bytes()
            if unit.stepped_by >= 0:
                stepped.append(size)
    threads = num_threads() if all(unit.device.type == "cpu" for unit in units) else 1
    return ExtraBytes(
        persistent=sum(persistent),
        in_step=sum(stepped) + sum(nlargest(threads, stepped)),
        in_collect=sum(nlargest(threads, persistent)),
        accumulated=accumulated,
    )
