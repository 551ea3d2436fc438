"""One owned local tensor: how to read its bits, and where each of its elements lies in the checkpoint.

Unit order: the elements of a unit are numbered in the order of its pieces (boxes of checkpoint tensors), each box row
by row. For nearly all layouts that is the row-major order of the local tensor itself ("natural") and costs nothing; a
transposed layout is rearranged when it is read, once, instead of mapping indices ever after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from torch_delta.capture import arrays
from torch_delta.capture.regions import is_natural
from torch_delta.capture.shards import local_tensor
from torch_delta.capture.sweep import sweep, sweep_masters
from torch_delta.capture.triton_sweep import sweep_on_device
from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.capture.names import ModelTensor
    from torch_delta.capture.regions import Piece
    from torch_delta.capture.shards import Shard
    from torch_delta.capture.sweep import Found


class Unit:
    """A local tensor whose changes this rank reports.

    Args:
        item: the model tensor (kept: the live object is read anew each time, `.data` may be swapped under it, and a
            buffer or a frozen parameter may be assigned anew).
        shard: what this rank holds of it; not empty.
        pieces: boxes of checkpoint tensors, ascending by local offset, covering the local tensor once.
        serving: dtype the checkpoint stores it in.
    """

    def __init__(self, item: ModelTensor, shard: Shard, pieces: Sequence[Piece], serving: torch.dtype) -> None:
        self.name = item.name
        self._bound = item.tensor
        self._home = item.home
        self._is_sharded = not item.is_buffer and isinstance(item.tensor, DTensor)
        self.stepped_by = -1
        """Number of the optimizer that updates it; -1: none, it is only compared at a collect."""
        self.is_buffer = item.is_buffer
        self.shard = shard
        self.pieces = tuple(pieces)
        self.serving = serving
        self.numel = shard.numel
        self.itemsize = torch.empty((), dtype=serving).element_size()
        self.is_natural = is_natural(self.pieces)
        self.starts = np.cumsum([0, *(piece.numel for piece in self.pieces)], dtype=np.int64)
        """Unit position of each piece's first element, and the end."""
        self._dtype = item.tensor.dtype

    @property
    def tensor(self) -> torch.Tensor:
        """The live tensor: what the module holds now, except that FSDP shows other tensors between its shards."""
        module, attribute = self._home
        now = (module._buffers if self.is_buffer else module._parameters).get(attribute)
        if self.is_buffer and now is None:
            raise CaptureError(f"{self.name}: its module no longer holds this buffer; attach again", tensor=self.name)
        return self._bound if now is None or self._is_sharded else now

    @property
    def device(self) -> torch.device:
        """Where the local tensor lives now."""
        return local_tensor(self.tensor).device

    def live(self) -> torch.Tensor:
        """The local tensor, flat and contiguous in row-major order, in its own dtype [numel]; may alias the weights.

        Raises:
            CaptureError: shape or dtype are not those attached to.
        """
        tensor = self.tensor
        if self.stepped_by >= 0 and tensor is not self._bound:
            raise CaptureError(
                f"{self.name}: the model now holds another object than the optimizer updates "
                "(load_state_dict(assign=True)?); build the optimizer anew and attach again",
                tensor=self.name,
            )
        local = local_tensor(tensor)
        if tuple(local.shape) != self.shard.local_shape or local.dtype != self._dtype:
            raise CaptureError(
                f"{self.name}: local tensor is now {local.dtype} {tuple(local.shape)}, was {self._dtype} "
                f"{self.shard.local_shape} when attached; re-sharding or retyping needs a new attach",
                tensor=self.name,
                expected=self.shard.local_shape,
                got=tuple(local.shape),
            )
        return local.reshape(-1)  # copies when the strides only look contiguous (F36); never touches padded storage

    def current(self) -> torch.Tensor:
        """Serving bits now, in unit order [numel]; may alias the weights."""
        bits = arrays.to_bits(self.live(), self.serving)
        if self.is_natural:
            return bits
        ordered = torch.empty_like(bits)
        base = bits.storage_offset()
        for piece, start, stop in zip(self.pieces, self.starts[:-1], self.starts[1:], strict=True):
            view = bits.as_strided(piece.box.shape, piece.strides, base + piece.offset)
            ordered[start:stop].view(piece.box.shape).copy_(view)
        return ordered

    def snapshot(self) -> torch.Tensor:
        """Serving bits now, in unit order, in memory of their own."""
        bits = self.current()
        aliases = bits.data_ptr() == local_tensor(self.tensor).data_ptr()
        return bits.clone() if aliases else bits

    def sweep(self, before: torch.Tensor) -> Found:
        """What differs between a copy of the serving bits and the bits now; the copy becomes the bits now.

        Args:
            before: bits in unit order [numel], on the device of the weights or on the host; written.
        """
        if self.is_natural and self.serving == torch.bfloat16:
            live = self.live()
            found = sweep_masters(before, live) if self._dtype == torch.float32 else None
            found = found if found is not None else sweep_on_device(before, live)
            if found is not None:
                return found
        return sweep(before, self.current())

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """Serving bits now at unit positions, O(len(index)) for natural units."""
        if not self.is_natural:
            return arrays.take(self.current(), index)
        live = self.live()
        if live.dtype == self.serving:
            return arrays.take(arrays.to_bits(live, self.serving), index)
        as_integers = arrays.to_bits(live, live.dtype)
        return arrays.to_bits(arrays.take(as_integers, index).view(live.dtype), self.serving)

    def local_positions(self, index: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Unit positions as flat positions in the row-major local tensor; not sorted unless natural."""
        if self.is_natural:
            return index
        positions = np.empty_like(index)
        owner = np.searchsorted(self.starts, index, side="right") - 1
        for number in np.unique(owner):
            piece, chosen = self.pieces[number], owner == number
            coordinates = np.unravel_index(index[chosen] - self.starts[number], piece.box.shape)
            positions[chosen] = piece.offset + sum(
                coordinate * stride for coordinate, stride in zip(coordinates, piece.strides, strict=True)
            )
        return positions
