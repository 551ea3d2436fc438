"""What changed in one owned shard, in the shard's own coordinates: for studies and for other transports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_delta.capture.arrays import to_bits
from torch_delta.capture.shards import global_indices

if TYPE_CHECKING:
    from torch_delta.capture.history import Record
    from torch_delta.capture.shards import Shard
    from torch_delta.capture.unit import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardChange:
    """Changes of one owned shard since the previous look. Tensors are on the shard's device and own their memory."""

    name: str
    """Canonical name of the model tensor."""
    shard: Shard
    """Full shape, local shape and runs of the shard."""
    dtype: torch.dtype
    """Serving dtype; `old` and `new` are its bits."""
    index: torch.Tensor | None
    """Ascending flat positions in the row-major local shard, int64 [n]. None: the weights moved outside
    `optimizer.step` in transient mode, so what changed is unknown and `new` holds the whole shard."""
    old: torch.Tensor | None
    """Old bits [n], integers of the dtype's width; None when `index` is."""
    new: torch.Tensor
    """New bits [n], or [numel] in row-major order when `index` is None."""

    @property
    def mask(self) -> torch.Tensor:
        """Which elements changed; bool, shape of the local shard. All True when unknown."""
        flat = torch.full((self.shard.numel,), self.index is None, dtype=torch.bool, device=self.new.device)
        if self.index is not None:
            flat[self.index] = True
        return flat.view(self.shard.local_shape)

    @property
    def xor(self) -> torch.Tensor:
        """`old ^ new` [n].

        Raises:
            ValueError: the old bits are unknown.
        """
        if self.old is None:
            raise ValueError(f"{self.name}: old bits are unknown; its weights moved outside optimizer.step")
        return self.old ^ self.new

    @property
    def density(self) -> float:
        """Changed elements over elements of the shard; 1.0 when unknown."""
        return 1.0 if self.index is None else self.index.numel() / self.shard.numel

    @property
    def global_index(self) -> torch.Tensor:
        """`index` as flat positions in the full model tensor, int64 [n]; all of the shard's when unknown."""
        positions = global_indices(self.shard).to(self.new.device)
        return positions if self.index is None else positions[self.index]

    @classmethod
    def of(cls, unit: Unit, record: Record | None) -> ShardChange:
        """Translate what a unit's memory found from unit order to row-major order."""
        index: torch.Tensor | None
        old: torch.Tensor | None
        if record is None:
            new = to_bits(torch.empty(0, dtype=unit.serving, device=unit.device), unit.serving)
            index, old = torch.empty(0, dtype=torch.int64, device=unit.device), new.clone()
        elif record.index is None or record.old is None:
            positions = torch.from_numpy(unit.local_positions(np.arange(unit.numel))).to(record.new.device)
            index, old, new = None, None, torch.empty_like(record.new)
            new[positions] = record.new
        else:
            moved = unit.local_positions(record.index.cpu().numpy().astype(np.int64))
            index, order = torch.sort(torch.from_numpy(moved).to(record.new.device))
            old, new = record.old[order], record.new[order]
        return cls(name=unit.name, shard=unit.shard, dtype=unit.serving, index=index, old=old, new=new)
