"""What a plan writes to one storage: scattered elements, or a strided block where a tensor is replaced as a whole."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.errors import ApplyFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from torch_delta.codec.bits import Bits, Index
    from torch_delta.vllm.routing.memory import Storage


class OnDevice(NamedTuple):
    """The arrays of a target, on the device of its storage, where that is not the host.

    Attributes:
        places: int64, or None for a block.
        old: signed integers of the element's width.
        new: the same.
    """

    places: torch.Tensor | None
    old: torch.Tensor
    new: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return sum(array.nbytes for array in self if array is not None)


class Scatter:
    """Elements of one storage, anywhere in it.

    Attributes:
        storage: to write to.
        index: flat positions, uint32 or uint64, each once; ascending but for transposed routes.
        old: unsigned bits that lie there.
        new: unsigned bits to write.
        device: the same on the device; then the arrays above are empty.
    """

    def __init__(self, storage: Storage, index: Index, old: Bits, new: Bits, sizes: Sequence[tuple[int, int]]) -> None:
        self.storage = storage
        self.count = int(index.size)
        self._tensors = [tensor for tensor, _ in sizes]
        self._ends = list(accumulate(size for _, size in sizes))
        self.index, self.old, self.new = index, old, new
        self.device: OnDevice | None = None
        if storage.host is None:
            import torch

            places = torch.from_numpy(index.astype(np.int64)).to(storage.flat.device)
            self.device = OnDevice(places, storage.to_device(old), storage.to_device(new))
            self.index, self.old, self.new = index[:0], old[:0], new[:0]

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        on_host = self.index.nbytes + self.old.nbytes + self.new.nbytes
        return on_host + (0 if self.device is None else self.device.nbytes)

    @property
    def is_aligned(self) -> bool:
        """Whether its elements lie in host memory as compiled code wants them."""
        host = self.storage.host
        return host is not None and host.ctypes.data % self.storage.itemsize == 0

    def tensor_at(self, element: int) -> int:
        """Schema index of the tensor that element number `element` belongs to."""
        return self._tensors[bisect_right(self._ends, element)]


class Block:
    """All elements of a route.

    Attributes:
        tensor: schema index.
        storage: to write to.
        offset: position of the first element in the storage.
        strides: in the storage, in elements, per dim.
        old: unsigned bits that lie there, in the shape of the block.
        new: unsigned bits to write.
        device: the same on the device; then the arrays above are empty.
    """

    def __init__(
        self, tensor: int, storage: Storage, *, offset: int, strides: tuple[int, ...], old: Bits, new: Bits
    ) -> None:
        self.tensor = tensor
        self.storage = storage
        self.offset = offset
        self.strides = strides
        self.shape: tuple[int, ...] = new.shape
        self.count = int(new.size)
        self.old, self.new = old, new
        self.device: OnDevice | None = None
        if storage.host is None:
            self.device = OnDevice(None, storage.to_device(old), storage.to_device(new))
            self.old, self.new = old.reshape(-1)[:0], new.reshape(-1)[:0]

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.old.nbytes + self.new.nbytes + (0 if self.device is None else self.device.nbytes)

    def tensor_at(self, element: int) -> int:  # noqa: ARG002 - the other kind of target needs it
        """Schema index of the tensor."""
        return self.tensor


class Batch:
    """Scatters to host memory with arrays of the same types, back to back; a segment is one of them.

    The scatters' own arrays become views of these.

    Attributes:
        scatters: in the order of the elements, none of them empty.
        addresses: int64, of each scatter's storage.
        ends: int64, one past the last element of each scatter.
        index: positions, each in the storage of its scatter.
        old: bits there.
        new: bits to write.
    """

    def __init__(self, scatters: Sequence[Scatter]) -> None:
        self.scatters = tuple(scatters)
        self.addresses = np.array([_address(scatter.storage) for scatter in scatters], np.int64)
        self.ends = np.cumsum([scatter.count for scatter in scatters], dtype=np.int64)
        total = int(self.ends[-1])
        self.index: Index = np.empty(total, scatters[0].index.dtype)
        self.old: Bits = np.empty(total, scatters[0].old.dtype)
        self.new: Bits = np.empty(total, scatters[0].new.dtype)
        for scatter, end in zip(scatters, self.ends, strict=True):
            part = slice(int(end) - scatter.count, int(end))
            for name in ("index", "old", "new"):
                mine = getattr(self, name)[part]
                mine[...] = getattr(scatter, name)
                setattr(scatter, name, mine)

    def segment_of(self, element: int) -> int:
        """Number of the scatter that an element belongs to."""
        return int(np.searchsorted(self.ends, element, side="right"))

    def locate(self, element: int) -> tuple[Scatter, int]:
        """The scatter that an element belongs to, and its number there."""
        segment = self.segment_of(element)
        scatter = self.scatters[segment]
        return scatter, element - (int(self.ends[segment]) - scatter.count)


def _address(storage: Storage) -> int:
    assert storage.host is not None, "on the host"
    return int(storage.host.ctypes.data)


def make_scatter(
    storage: Storage, index: npt.NDArray[np.int64], old: Bits, new: Bits, sizes: Sequence[tuple[int, int]]
) -> Scatter:
    """Check positions against the storage and put them in their shortest form.

    Args:
        storage: to write to.
        index: positions in it.
        old: bits there.
        new: bits to write.
        sizes: ``(tensor, number of elements)`` in the order of `index`.

    Raises:
        ApplyFailed: a position outside the storage, or one twice: a route is wrong; nothing was written.
    """
    ascending = bool((index[1:] > index[:-1]).all())
    ordered = index if ascending else np.sort(index)
    if not ascending and not bool((ordered[1:] > ordered[:-1]).all()):
        raise _wrong_route(storage, "two elements of the patch would land in one place")
    if ordered.size and (int(ordered[0]) < 0 or int(ordered[-1]) >= storage.numel):
        raise _wrong_route(storage, f"positions {int(ordered[0])} to {int(ordered[-1])} of {storage.numel} elements")
    return Scatter(storage, index.astype(place_dtype(storage.numel)), old, new, sizes)


def place_dtype(numel: int) -> np.dtype[Any]:
    """Type of positions in a storage of `numel` elements: as few bytes as will do, and unsigned."""
    return np.dtype("<u4") if numel <= 1 << 32 else np.dtype("<u8")


def _wrong_route(storage: Storage, what: str) -> ApplyFailed:
    return ApplyFailed(
        f"routes into {storage.names[0]} are wrong: {what}; nothing was written. Use mode 'reload'",
        parameter=storage.names[0],
        undone=True,
    )
