"""Which elements of a full tensor this rank's local tensor holds.

A shard of a DTensor is a product of per-dim index sets, and each set is a short list of contiguous runs in local order:
`Shard` gives one run, `_StridedShard` (FSDP over TP) up to `split_factor` runs, `Replicate` the full range. That is
computed from metadata alone. torch's own helpers give only the first offset of a multi-run shard, and `_StridedShard`
stopped being a subclass of `Shard` (F37), so placements are recognised by exact class and everything unknown is
refused. `self_test` proves the arithmetic against torch's own gather on the mesh at hand.

Words: mesh *axis*, tensor *dim*.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Runs = tuple[tuple[int, int], ...]
"""((global start, length), ...) along one dim, in local order, lengths positive, neighbours coalesced."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a full tensor one rank holds."""

    shape: tuple[int, ...]
    """Of the full tensor, from metadata: summing up local shapes is wrong for uneven shards (F42)."""
    runs: tuple[Runs, ...]
    """One entry per dim; an empty entry means the local tensor has no elements along it."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        return tuple(sum(length for _, length in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        """Elements held locally."""
        return prod(self.local_shape)


def whole(shape: Iterable[int]) -> Shard:
    """The shard of a plain tensor: everything."""
    sizes = tuple(int(size) for size in shape)
    return Shard(sizes, tuple(((0, size),) if size else () for size in sizes))


def shard_of(name: str, tensor: torch.Tensor) -> Shard:
    """The shard a live parameter or buffer holds on this rank. Metadata only, no collective.

    Args:
        name: canonical name, for errors.
        tensor: plain tensor or DTensor.

    Raises:
        CaptureError: placements that cannot be published exactly, or a local tensor that contradicts its placements.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Shard(tuple(tensor.shape), tuple(() for _ in tensor.shape))
    _check_order(name, tensor)
    shard = shard_from_placements(name, tensor.shape, mesh.shape, coordinate, tensor.placements)
    got = tuple(tensor._local_tensor.shape)
    if got != shard.local_shape:
        raise CaptureError(
            f"{name}: the local tensor has shape {got}, its placements {tensor.placements} on mesh "
            f"{tuple(mesh.shape)} say {shard.local_shape}; this layout cannot be captured",
            tensor=name,
            expected=shard.local_shape,
            got=got,
        )
    return shard


def shard_from_placements(
    name: str,
    shape: Iterable[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
) -> Shard:
    """Apply placements axis by axis, left to right, as DTensor does.

    Args:
        name: canonical name, for errors.
        shape: of the full tensor.
        mesh_shape: ranks along each mesh axis.
        coordinate: this rank's position along each mesh axis.
        placements: one per mesh axis.
    """
    start = whole(shape)
    runs = list(start.runs)
    for num_ranks, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in {"Shard", "_StridedShard"}:
            raise CaptureError(
                f"{name}: placement {placement} cannot be published: a rank's local values are not elements of the "
                "full tensor. Redistribute it to Shard or Replicate before attaching",
                tensor=name,
                placement=str(placement),
            )
        dim = placement.dim % max(len(runs), 1)
        size = sum(length for _, length in runs[dim])
        blocks = int(placement.split_factor) if kind == "_StridedShard" else 1
        taken: list[tuple[int, int]] = []
        for block in range(blocks):
            block_start, block_size = _chunk(size, blocks, block)
            start_in_block, length = _chunk(block_size, num_ranks, position)
            taken += _take(runs[dim], block_start + start_in_block, length)
        runs[dim] = _coalesce(taken)
    return Shard(start.shape, tuple(runs))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor without autograd and without a DTensor operation (F43): those re-plan and retain objects."""
    from torch.distributed.tensor import DTensor

    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach()


def self_test(samples: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Prove the run arithmetic on each distinct (mesh, placements) of the model. Collective over each mesh.

    Every rank fills a shard with the global indices it believes it holds; torch's gather must return 0, 1, 2, ... in
    order. Costs one gather of a small parameter per distinct layout (F34).

    Args:
        samples: (name, tensor), the same names in the same order on all ranks of a mesh; plain tensors are skipped.

    Raises:
        CaptureError: torch places elements elsewhere than we computed.
    """
    from torch.distributed.tensor import DTensor

    chosen: dict[tuple[Any, ...], tuple[str, DTensor]] = {}
    for name, tensor in samples:
        if isinstance(tensor, DTensor) and tensor.numel():
            key = (id(tensor.device_mesh), tuple(map(str, tensor.placements)))
            if key not in chosen or _tells_more(tensor, chosen[key][1]):
                chosen[key] = (name, tensor)
    for name, tensor in chosen.values():
        shard = shard_of(name, tensor)
        local = global_indices(shard).reshape(shard.local_shape).to(tensor.device_mesh.device_type)
        stand_in = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=torch.empty(tensor.shape, device="meta").stride(),
        )
        gathered = stand_in.full_tensor().cpu().reshape(-1)
        if not torch.equal(gathered, torch.arange(tensor.numel())):
            raise CaptureError(
                f"{name}: this torch ({torch.__version__}) places elements of {tensor.placements} differently from "
                "what torch_delta computes; refusing to publish permuted weights",
                tensor=name,
            )


def global_indices(shard: Shard) -> torch.Tensor:
    """Flat indices in the full tensor of the local elements, local row-major order; int64, shape [numel]."""
    flat = torch.zeros((), dtype=torch.int64)
    for size, runs in zip(shard.shape, shard.runs, strict=True):
        along = torch.cat([torch.arange(start, start + n) for start, n in runs] or [torch.empty(0, dtype=torch.int64)])
        flat = flat.unsqueeze(-1) * size + along
    return flat.reshape(-1)


def _tells_more(tensor: Any, other: Any) -> bool:
    """Whether a tensor is the better sample: large enough for every rank to hold some of it, then small."""
    enough = 16 * tensor.device_mesh.size()
    if min(tensor.numel(), other.numel()) < enough:
        return bool(tensor.numel() > other.numel())
    return bool(tensor.numel() < other.numel())


def _check_order(name: str, tensor: Any) -> None:
    """Refuse a shard order other than left to right: placements alone would then not say who holds what."""
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    if order is None:
        return
    default = type(spec).compute_default_shard_order(spec.placements)
    if tuple(order) != tuple(default):
        raise CaptureError(f"{name}: unusual shard order {order}, expected {default}", tensor=name)


def _chunk(size: int, num_parts: int, part: int) -> tuple[int, int]:
    """(start, length) of one part as `torch.chunk` cuts: equal parts rounded up, the last ones short or empty."""
    step = -(-size // num_parts)
    start = min(size, step * part)
    return start, min(size, start + step) - start


def _take(runs: Runs, start: int, length: int) -> list[tuple[int, int]]:
    """Positions [start, start + length) of the concatenated runs, as runs."""
    taken = []
    position = 0
    for first, size in runs:
        low, high = max(start, position), min(start + length, position + size)
        if low < high:
            taken.append((first + low - position, high - low))
        position += size
    return taken


def _coalesce(runs: Iterable[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for first, size in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((first, size))
    return tuple(merged)
