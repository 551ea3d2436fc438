"""Which elements of a unit in host memory have changed since the last collect: one bit each.

With it a change costs the same however many steps lie between two collects: only the first old bits of an element are
kept, and no sets of positions are merged until a collect.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torch_delta.capture.kernels import GATE


class Marks:
    """Marks for `numel` elements, none set. Threads: one at a time.

    Args:
        numel: elements of the unit.
    """

    def __init__(self, numel: int) -> None:
        self._bitmap = np.zeros(-(-numel // 8), np.uint8)

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self._bitmap.nbytes

    def add(self, index: torch.Tensor) -> torch.Tensor:
        """Mark elements.

        Args:
            index: their positions, each once; int32 or int64.

        Returns:
            Places in `index` of those that were not marked before, ascending, int64.
        """
        positions = index.numpy()
        kernel = GATE.get(positions.size)
        if kernel is None:
            return torch.from_numpy(_add_plainly(self._bitmap, positions))
        found = np.empty(positions.size, np.int64)
        return torch.from_numpy(found[: kernel(positions, self._bitmap, found)].copy())


def _add_plainly(bitmap: Any, positions: Any) -> Any:
    """The reference of `GATE`."""
    byte, bit = positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8)
    fresh = np.flatnonzero((bitmap[byte] & bit) == 0)
    np.bitwise_or.at(bitmap, byte, bit)
    return fresh
