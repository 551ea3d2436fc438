"""Where a persistent snapshot lives."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from pathlib import Path

PlacementKind = Literal["device", "cpu", "pinned", "file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A policy for snapshot memory; the bytes are numel * itemsize of the owned shard in every case.

    Raises:
        CaptureError: pinned memory without CUDA, or a file placement without a usable directory.
    """

    kind: PlacementKind = "device"
    """`device`: next to the weights. `cpu`: pageable host memory (the same thing for CPU weights). `pinned`:
    page-locked host memory, faster to fill from a GPU but taken from the whole machine (F50). `file`: mapped files in
    `directory`, so that the page cache decides what stays in memory."""
    directory: Path | None = None
    """For `file` only: a directory on a local disk; files are removed from it at once and vanish with the process."""

    def __post_init__(self) -> None:
        """Check the combination."""
        if self.kind not in {"device", "cpu", "pinned", "file"}:
            raise CaptureError(f"unknown snapshot placement {self.kind!r}; expected device, cpu, pinned or file")
        if self.kind == "pinned" and not torch.cuda.is_available():
            raise CaptureError("snapshot placement 'pinned' needs CUDA; use 'cpu'")
        if (self.kind == "file") != (self.directory is not None):
            raise CaptureError("snapshot placement 'file' needs a directory, and only it takes one")
        if self.directory is not None and not self.directory.is_dir():
            raise CaptureError(f"snapshot directory {str(self.directory)!r} does not exist")

    def keep(self, bits: torch.Tensor) -> torch.Tensor:
        """A copy of `bits` (1-D integers) in memory of its own, at this place."""
        if self.kind == "device":
            return bits.clone()
        if self.kind == "file":
            kept = self._mapped(bits)
        else:
            kept = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=self.kind == "pinned")
        kept.copy_(bits)
        return kept

    def _mapped(self, bits: torch.Tensor) -> torch.Tensor:
        dtype = torch.empty(0, dtype=bits.dtype).numpy().dtype
        with tempfile.TemporaryFile(dir=self.directory) as file:  # already unlinked; the mapping keeps it alive
            array = np.memmap(file, dtype=dtype, mode="w+", shape=(bits.numel(),))
        return torch.from_numpy(array)
