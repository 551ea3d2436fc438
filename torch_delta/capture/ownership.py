"""Who reports which elements, decided once.

Replication cannot be read off one tensor's placements: under FSDP+TP the norms live on the data-parallel axis only, so
their copies on the tensor-parallel axis are invisible, and under DDP nothing is a DTensor at all. So every rank says
once which regions it holds; for each region one of its holders becomes the owner, the least loaded first. The same
exchange proves that the regions of every tensor cover it exactly once, that copies are copies, and carries every
rank's refusal to every other rank, so that all raise together instead of some waiting for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_delta.capture.shards import Runs

    Index = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True)
class Held:
    """One model tensor as held by one rank."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    runs: tuple[Runs, ...]
    """The part held; empty parts are not listed."""
    num_bytes: int
    """Size of the part in the serving dtype."""
    is_buffer: bool
    print: bytes
    """Fingerprint of the part's serving bits; compared between copies of a parameter."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a rank brings to the exchange."""

    held: Mapping[str, Held] = field(default_factory=dict)
    """By canonical model name."""
    views_print: str = ""
    """sha256 of the checkpoint tensors this rank's model makes up; equal on all ranks unless a pipeline splits them."""
    walks: bool = False
    """Whether it can walk over full tensors (tensor sources only)."""
    error: str = ""
    """Why this rank cannot be captured; the rest is then empty."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Those of the error."""

    @classmethod
    def refusal(cls, error: Exception) -> Claim:
        """The claim of a rank that cannot take part."""
        if isinstance(error, CaptureError):
            return cls(error=error.message, facts=error.facts)
        return cls(error=f"{type(error).__name__}: {error}")


def exchange(
    claim: Claim, group: dist.ProcessGroup | None, *, cause: Exception | None = None
) -> tuple[int, list[Claim]]:
    """Give every rank every rank's claim. A no-op without torch.distributed.

    Args:
        claim: this rank's.
        group: None for all ranks.
        cause: what this rank's refusal came from, for its own traceback.

    Returns:
        This rank's position in the group, and the claims in rank order.

    Raises:
        CaptureError: on all ranks alike, if any rank has an error; `.failures` by rank.
    """
    rank, claims = 0, [claim]
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(group)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, claim, group=group)
        claims = gathered
    failures = {number: other.error for number, other in enumerate(claims) if other.error}
    if failures:
        first = min(failures)
        where = f" (rank {first} of {len(claims)})" if len(claims) > 1 else ""
        raise CaptureError(f"{failures[first]}{where}", **{**claims[first].facts, "failures": failures}) from cause
    return rank, claims


def elect(claims: Sequence[Claim]) -> list[set[str]]:
    """Choose one owner for every region. Pure; all ranks compute the same answer.

    Args:
        claims: by rank, without errors.

    Returns:
        By rank, the model tensors whose held part it owns.

    Raises:
        CaptureError: parts of a tensor overlap or leave a hole, copies differ, or ranks disagree about a shape.
    """
    holders: dict[str, dict[tuple[Runs, ...], list[int]]] = {}
    for rank, claim in enumerate(claims):
        for name, held in claim.held.items():
            holders.setdefault(name, {}).setdefault(held.runs, []).append(rank)
    regions = []
    for name, parts in holders.items():
        first = claims[next(iter(parts.values()))[0]].held[name]
        _check_shapes(name, [(rank, claims[rank].held[name].shape) for ranks in parts.values() for rank in ranks])
        _check_cover(name, first.shape, list(parts))
        for runs, ranks in parts.items():
            if not first.is_buffer:
                _check_copies(name, {rank: claims[rank].held[name].print for rank in ranks})
            regions.append((claims[ranks[0]].held[name].num_bytes, name, runs, ranks[:1] if first.is_buffer else ranks))
    shares = least_loaded([(size, (name, runs), ranks) for size, name, runs, ranks in regions], len(claims))
    return [{name for name, _ in share} for share in shares]


def least_loaded(items: Iterable[tuple[int, Any, Sequence[int]]], num_ranks: int) -> list[list[Any]]:
    """Give every item to the candidate with the least bytes so far, largest items first. Pure and deterministic.

    Args:
        items: (bytes, sortable key, candidate ranks).
        num_ranks: ranks in the group.

    Returns:
        By rank, the keys it got.
    """
    loads = [0] * num_ranks
    shares: list[list[Any]] = [[] for _ in range(num_ranks)]
    for num_bytes, key, candidates in sorted(items, key=lambda item: (-item[0], item[1])):
        chosen = min(candidates, key=lambda rank: (loads[rank], rank))
        loads[chosen] += num_bytes
        shares[chosen].append(key)
    return shares


def _check_shapes(name: str, shapes: Iterable[tuple[int, tuple[int, ...]]]) -> None:
    by_shape = {shape: rank for rank, shape in shapes}
    if len(by_shape) > 1:
        raise CaptureError(
            f"{name}: ranks disagree about its full shape: "
            + ", ".join(f"{shape} on rank {rank}" for shape, rank in by_shape.items()),
            tensor=name,
        )


def _check_copies(name: str, prints: Mapping[int, bytes]) -> None:
    if len(set(prints.values())) > 1:
        reference = next(iter(prints.values()))
        other = next(rank for rank, value in prints.items() if value != reference)
        raise CaptureError(
            f"{name}: ranks {next(iter(prints))} and {other} hold the same elements with different values. If these "
            "are different tensors under one name (experts sharded outside DTensor), they cannot be captured; if they "
            "are copies, synchronise them before attaching",
            tensor=name,
            ranks=(next(iter(prints)), other),
        )


def _check_cover(name: str, shape: tuple[int, ...], parts: Sequence[tuple[Runs, ...]]) -> None:
    """Prove that the parts are disjoint and leave nothing out, on a grid of all their boundaries."""
    edges = [
        np.unique([0, size, *(edge for part in parts for start, n in part[dim] for edge in (start, start + n))])
        for dim, size in enumerate(shape)
    ]
    counts = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int32)
    for part in parts:
        cells = [_cells(edge, runs) for edge, runs in zip(edges, part, strict=True)]
        counts[np.ix_(*cells)] += 1
    if prod(shape) and not bool((counts == 1).all()):
        what = "overlap" if bool((counts > 1).any()) else "leave a hole"
        raise CaptureError(
            f"{name}: the parts held by the ranks {what} in the full tensor of shape {shape}; its placements must be "
            "the same on all ranks, and every shard must be attached",
            tensor=name,
        )


def _cells(edges: Index, runs: Runs) -> Index:
    """Grid cells along one dim that a part covers."""
    spans = [np.arange(*np.searchsorted(edges, (start, start + length))) for start, length in runs]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.intp)
