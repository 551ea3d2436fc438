"""Compare weights with a copy of them, take what differs, and move the copy along: one reading of both.

On the host compiled kernels do it (`kernels.py`), over pieces of `PIECE` elements on several threads; without numba,
and on a device, the plain path of `arrays` does the same in three passes. All give the same bits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from torch_delta.capture import arrays
from torch_delta.capture.crew import share
from torch_delta.capture.kernels import BLOCK, SWEEP, SWEEP_MASTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.capture.source import Bits

PIECE: Final = 1 << 20
"""Elements one thread sweeps at a time, into room for their positions, old and new bits (4 + 2 * itemsize bytes per
element) that it keeps for the next piece: its pages are warm then, and an array of a few hundred elements costs no more
than sweeping it. Only what is filled becomes memory, and room of which more than an eighth was filled is let go, so
that a thread keeps some 2 MiB."""

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions that differ (as `arrays.compare` gives them), bits before, bits now; in memory of their own."""


def sweep(before: torch.Tensor, now: torch.Tensor) -> Found:
    """What differs between two arrays of bits; `before` becomes `now`.

    Args:
        before: bits [n], written.
        now: bits [n] of the same dtype, on any device.
    """
    if not before.is_cpu:
        return _plainly(before, now.to(before.device))
    kernel = SWEEP[before.element_size()].get(before.numel())
    if kernel is None:
        return _plainly(before, now.cpu())
    new = arrays.host(now)

    def piece(part: slice, was: Bits, index: Any, old: Bits, found: Bits) -> int:
        count: int = kernel(new[part], was, index, old, found)
        return count

    return _in_pieces(before, piece)


def sweep_masters(before: torch.Tensor, masters: torch.Tensor) -> Found | None:
    """The same for fp32 weights served in bf16, without the cast in between; None where there is no such pass.

    Args:
        before: bf16 bits [n], written.
        masters: fp32 weights [n].
    """
    nan_bits = arrays.nan_bits()
    if not before.is_cpu or not masters.is_cpu or nan_bits is None:
        return None
    kernel = SWEEP_MASTERS.get(before.numel())
    if kernel is None:
        found = arrays.compare_masters(before, masters)
        return None if found is None else _moved(before, *found)
    wide = arrays.host(masters.view(torch.int32))

    def piece(part: slice, was: Bits, index: Any, old: Bits, found: Bits) -> int:
        count: int = kernel(wide[part], nan_bits, np.empty(BLOCK, np.uint16), was, index, old, found)
        return count

    return _in_pieces(before, piece)


def _plainly(before: torch.Tensor, now: torch.Tensor) -> Found:
    return _moved(before, *arrays.compare(before, now))


def _moved(before: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> Found:
    old = arrays.take(before, index)
    arrays.put(before, index, new)
    return index, old, new


def _in_pieces(before: torch.Tensor, work: Callable[[slice, Bits, Any, Bits, Bits], int]) -> Found:
    if not before.numel():
        nothing = before[:0].clone()
        return torch.empty(0, dtype=torch.int32), nothing, nothing
    bits = arrays.host(before)
    kind: Any = np.int32 if arrays.index_dtype(bits.size) == torch.int32 else np.int64

    def run(start: int) -> tuple[Any, Bits, Bits]:
        part = slice(start, min(start + PIECE, bits.size))
        index, old, new = _room.of(bits.itemsize)
        count = work(part, bits[part], index, old, new)
        positions = index[:count].astype(kind)
        if start:
            positions += kind(start)
        found = positions, old[:count].copy(), new[:count].copy()
        if count > PIECE >> 3:
            _room.let_go()
        return found

    parts = [run(0)] if bits.size <= PIECE else share(run, range(0, bits.size, PIECE))
    index, old, new = parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
    return torch.from_numpy(index), arrays.as_bits(old), arrays.as_bits(new)


class _Room(threading.local):
    """Where the kernels put what they find in a piece, of the thread that runs them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Bits, Bits]] = {}

    def of(self, itemsize: int) -> tuple[Any, Bits, Bits]:
        """Positions, old and new bits [at least PIECE each] of elements of so many bytes."""
        kept = self._kept.get(itemsize)
        if kept is None or kept[0].size < PIECE:
            bits = np.dtype(f"u{itemsize}")
            kept = np.empty(PIECE, np.int32), np.empty(PIECE, bits), np.empty(PIECE, bits)
            self._kept = {itemsize: kept}  # models have one dtype, or nearly
        return kept

    def let_go(self) -> None:
        """Give the memory back."""
        self._kept = {}


_room = _Room()
