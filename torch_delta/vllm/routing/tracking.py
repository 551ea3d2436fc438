"""What the probe knows about tensors while `load_weights` runs: which elements of which checkpoint tensor they hold.

A checkpoint tensor is stood in for by a meta tensor (no memory). Views of it share its storage, so offset and strides
say what they are. A contiguous copy gets a storage of its own, and with it a description of where each element came
from. Anything else that is computed from checkpoint tensors only remembers which ones, and what was done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.vllm.routing.affine import NotAffine, make_piece, row_major, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from torch_delta.vllm.routing.affine import Piece


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; valid while something keeps the storage alive."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the elements of a storage came from, in one checkpoint tensor.

    The storage is a row-major array of `shape`; its element ``i`` is element ``first + sum(i_k * strides[k])`` of the
    flat checkpoint tensor.

    Attributes:
        feed: number of the checkpoint tensor, in the order in which they are fed.
        itemsize: bytes per element.
        first: position in the flat checkpoint tensor of the first element.
        shape: extents of the array.
        strides: in the flat checkpoint tensor.
    """

    feed: int
    itemsize: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def loops(self, view: torch.Tensor) -> tuple[int, list[list[tuple[int, int, int]]]]:
        """A view of the storage in terms of the checkpoint tensor.

        Args:
            view: a tensor of this storage, not empty.

        Returns:
            Position of its first element in the checkpoint tensor; and for each of its dims the loops it is made of,
            ``(size, source stride, iterations of the dim per iteration of the loop)``.

        Raises:
            NotAffine: the view has another element width, or runs across rows of the copy.
        """
        if view.element_size() != self.itemsize:
            raise NotAffine(
                f"its loader reads it as elements of {view.element_size()} bytes instead of {self.itemsize}"
            )
        found = split(int(view.storage_offset()), list(zip(view.shape, view.stride(), strict=True)), self.shape)
        broadcast = [size > 1 and stride == 0 for size, stride in zip(view.shape, view.stride(), strict=True)]
        if any(broadcast):
            raise NotAffine("one element lands in several places")
        if found is None:
            raise NotAffine("its loader copies it in steps that no strided map describes")
        start, parts = found
        loops: list[list[tuple[int, int, int]]] = [[] for _ in view.shape]
        for part in parts:
            loops[part.loop].append((part.size, part.step * self.strides[part.dim], part.every))
        return self.first + sum(at * stride for at, stride in zip(start, self.strides, strict=True)), loops


@dataclass(slots=True)
class Tracker:
    """Storages that hold, or depend on, checkpoint tensors.

    Attributes:
        origins: by storage.
        stained: by storage, the feeds it was computed from and the operation that did it.
    """

    origins: dict[int, Origin] = field(default_factory=dict)
    stained: dict[int, tuple[frozenset[int], str]] = field(default_factory=dict)
    _alive: list[torch.Tensor] = field(default_factory=list)  # so that no storage's identity is given away again

    def root(self, tensor: torch.Tensor, feed: int) -> None:
        """`tensor` stands in for a whole checkpoint tensor."""
        self._alive.append(tensor)
        self.origins[storage_id(tensor)] = Origin(feed, tensor.element_size(), 0, (tensor.numel(),), (1,))

    def copied(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """`copy`, dense in memory and of the same shape, holds what `source` holds."""
        self._alive.append(copy)
        origin = self.origins[storage_id(source)]
        if not source.numel():
            self.origins[storage_id(copy)] = Origin(origin.feed, origin.itemsize, 0, (0,), (1,))
            return
        try:
            first, loops = origin.loops(source)
        except NotAffine as error:
            self.stain(copy, [origin.feed], str(error))
            return
        shape: list[int] = []
        strides: list[int] = []
        steps = copy.stride()
        in_memory_order = sorted(range(copy.ndim), key=lambda dim: (-steps[dim], dim))
        for dim in in_memory_order:
            for size, stride, _ in sorted(loops[dim], key=lambda loop: -loop[2]):
                shape.append(size)
                strides.append(stride)
        self.origins[storage_id(copy)] = Origin(origin.feed, origin.itemsize, first, tuple(shape), tuple(strides))

    def stain(self, tensor: torch.Tensor, feeds: Iterable[int], what: str) -> None:
        """What `tensor` holds depends on these feeds in a way nothing more is known about."""
        self._alive.append(tensor)
        before = self.stained.get(storage_id(tensor), (frozenset(), what))
        self.stained[storage_id(tensor)] = before[0] | frozenset(feeds), before[1]
        self.origins.pop(storage_id(tensor), None)

    def feeds(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Checkpoint tensors that any of these depend on."""
        found: set[int] = set()
        for tensor in tensors:
            at = storage_id(tensor)
            if at in self.origins:
                found.add(self.origins[at].feed)
            found |= self.stained.get(at, (frozenset(), ""))[0]
        return frozenset(found)

    def piece(self, source: torch.Tensor, target: torch.Tensor) -> Piece:
        """Where the elements of `source` land when it is copied to `target`, of the same shape and not empty.

        Raises:
            NotAffine: no strided map says it.
        """
        first, loops = self.origins[storage_id(source)].loops(source)
        steps = target.stride()
        dims = [
            (size, stride, every * steps[dim]) for dim, of_dim in enumerate(loops) for size, stride, every in of_dim
        ]
        return make_piece(first, int(target.storage_offset()), dims)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this shape and strides fills its storage, in some order of its dims."""
    real = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    sizes = [size for _, size in reversed(real)]
    return tuple(stride for stride, _ in reversed(real)) == row_major(sizes)
