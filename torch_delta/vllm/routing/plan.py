"""What one apply writes on this rank: made outside the pause, so that inside it only memory is moved.

For every storage a plan holds where, the bits that lie there now and the bits to write: O(changed) memory. The old bits
are gathered when the plan is made. `check_summaries` proves them, over all ranks, against the published digests of both
versions; the write then compares them again, bit for bit, before anything is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.digest import digest_box, digest_delta
from torch_delta.errors import ApplyFailed, DigestMismatch
from torch_delta.format.digest import ZERO, Digest
from torch_delta.vllm.routing.jobs import make_jobs
from torch_delta.vllm.routing.merge import merge_changes
from torch_delta.vllm.routing.targets import Block, Scatter, make_scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_delta.codec.bits import Bits, Index
    from torch_delta.format.schema import Schema
    from torch_delta.receive.patches import Patch
    from torch_delta.vllm.routing.affine import Piece
    from torch_delta.vllm.routing.jobs import HostJob
    from torch_delta.vllm.routing.memory import Storage
    from torch_delta.vllm.routing.merge import Changes
    from torch_delta.vllm.routing.reach import Route


class Cancelled(Exception):
    """The caller's `cancelled` said so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """What a rank's plan does, for the other ranks: picklable and small.

    Attributes:
        version: the plan leads to.
        sent: per routed tensor that is touched, distinct elements that the patches set; the same on every rank.
        owned: of these, how many this rank holds and counts.
        deltas: what writing the owned ones adds to the tensor's digest, from the bits that are live to the new ones.
    """

    version: int
    sent: Mapping[int, int]
    owned: Mapping[int, int]
    deltas: Mapping[int, Digest]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Ready to be written, once, onto the state it was made for.

    Attributes:
        version: it leads to.
        num_elements: writes on this rank.
        unrouted: touched tensors that need the reload path; the plan does nothing for them.
        summary: for the other ranks.
        epoch: of the live state it was made for.
        targets: what to write, by storage.
        jobs: the same where it is host memory, cut into units of work.
    """

    version: int
    num_elements: int
    unrouted: frozenset[int]
    summary: PlanSummary
    epoch: int
    targets: tuple[Scatter | Block, ...]
    jobs: tuple[HostJob, ...]

    @property
    def nbytes(self) -> int:
        """Memory that the plan holds, on the host and on the device."""
        return sum(target.nbytes for target in self.targets)

    def __repr__(self) -> str:
        return f"Plan(version={self.version}, num_elements={self.num_elements}, targets={len(self.targets)})"


class _Part(NamedTuple):
    """Elements of one route, for one storage."""

    tensor: int
    places: npt.NDArray[np.int64]
    old: Bits
    new: Bits


def make_plan(
    schema: Schema,
    routes: Mapping[int, Sequence[Route]],
    unrouted: Mapping[int, str],
    patches: Sequence[Patch],
    *,
    epoch: int,
    cancelled: Callable[[], bool],
) -> Plan:
    """Resolve patches to this rank's memory.

    Args:
        schema: of the stream.
        routes: of the routed tensors.
        unrouted: tensors that go by the reload path.
        patches: of consecutive versions, in order, at least one.
        epoch: of the live state.
        cancelled: asked between tensors.

    Raises:
        FormatError: a patch says something impossible.
        Cancelled: asked to stop.
    """
    if not patches:
        raise ValueError("a plan needs at least one patch")
    touched = sorted({tensor for patch in patches for tensor in patch})
    sent: dict[int, int] = {}
    owned: dict[int, int] = {}
    deltas: dict[int, Digest] = {}
    parts: dict[int, list[_Part]] = {}
    storages: dict[int, Storage] = {}
    targets: list[Scatter | Block] = []
    for tensor in touched:
        if tensor not in routes:
            continue
        if cancelled():
            raise Cancelled
        changes = merge_changes(schema.tensors[tensor], [patch[tensor] for patch in patches if tensor in patch])
        sent[tensor], owned[tensor], deltas[tensor] = changes.num_changed, 0, ZERO
        for route in routes[tensor]:
            if changes.positions is None:
                count, delta = _add_block(route, changes, targets)
            else:
                storages[id(route.storage)] = route.storage
                of_storage = parts.setdefault(id(route.storage), [])
                count, delta = _add_part(route, changes.positions, changes.values, of_storage)
            if route.owned:
                owned[tensor] += count
                deltas[tensor] += delta
    for at, storage in storages.items():
        found = sorted((part for part in parts.pop(at) if part.places.size), key=lambda part: int(part.places[0]))
        if found:
            targets.append(
                make_scatter(
                    storage,
                    np.concatenate([part.places for part in found]),
                    np.concatenate([part.old for part in found]),
                    np.concatenate([part.new for part in found]),
                    [(part.tensor, part.places.size) for part in found],
                )
            )
    version = patches[-1].version
    return Plan(
        version=version,
        num_elements=sum(target.count for target in targets),
        unrouted=frozenset(touched) & unrouted.keys(),
        summary=PlanSummary(version=version, sent=sent, owned=owned, deltas=deltas),
        epoch=epoch,
        targets=tuple(targets),
        jobs=make_jobs(targets),
    )


def _add_part(route: Route, positions: npt.NDArray[np.int64], values: Bits, parts: list[_Part]) -> tuple[int, Digest]:
    """Elements of a route among `positions`; their number and what they add to the digest."""
    chosen, index = select(route.piece, positions)
    new = values[chosen]
    old = route.storage.take(index)
    parts.append(_Part(route.tensor, index, old, new))
    return index.size, digest_delta(positions[chosen], old, new) if route.owned else ZERO


def _add_block(route: Route, changes: Changes, targets: list[Scatter | Block]) -> tuple[int, Digest]:
    """All elements of a route."""
    box = route.box
    where = tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
    new = np.array(changes.values.reshape(route.shape)[where], order="C")  # a copy: patches are mapped files
    old = np.array(route.storage.view(route.piece.target, box.shape, route.strides), order="C")
    targets.append(
        Block(route.tensor, route.storage, offset=route.piece.target, strides=route.strides, old=old, new=new)
    )
    if not route.owned:
        return box.numel, ZERO
    return box.numel, digest_box(new, box, route.shape) - digest_box(old, box, route.shape)


def select(piece: Piece, positions: npt.NDArray[np.int64]) -> tuple[slice | Index, npt.NDArray[np.int64]]:
    """Which positions of a tensor a piece holds, and where.

    Args:
        piece: of the tensor.
        positions: flat in the tensor, increasing.

    Returns:
        What to subscript `positions` with, and the position in the storage of each of these.
    """
    first, end = np.searchsorted(positions, (piece.source, piece.source_end))
    rest = positions[first:end] - piece.source
    index = np.full_like(rest, piece.target)
    inside: npt.NDArray[np.bool_] | None = None
    for dim in piece.dims:
        if dim.source == 1:
            here, rest = rest, np.zeros_like(rest)
        else:
            here, rest = np.divmod(rest, dim.source)
        index += here * dim.target
        if here.size and int(here.max()) >= dim.size:
            inside = here < dim.size if inside is None else inside & (here < dim.size)
    if rest.any():
        inside = rest == 0 if inside is None else inside & (rest == 0)
    if inside is None:
        return slice(int(first), int(end)), index
    chosen = np.flatnonzero(inside)
    return chosen + first, index[chosen]


def check_summaries(
    summaries: Sequence[PlanSummary],
    *,
    before: Mapping[int, Digest] | None,
    after: Mapping[int, Digest] | None,
    names: Callable[[int], str],
) -> None:
    """Prove the plans of all ranks together, before any of them is written.

    Args:
        summaries: of all ranks, for one version.
        before: published digests of the live version, by schema index; None to check counts only.
        after: published digests of the version the plans lead to.
        names: of tensors, for messages.

    Raises:
        ApplyFailed: the ranks plan different things, or an element would be lost or counted twice; nothing is written.
        DigestMismatch: the bits that would be overwritten, or the new ones, are not those of the published versions.
    """
    first = summaries[0]
    for summary in summaries:
        if summary.version != first.version or summary.sent != first.sent:
            raise ApplyFailed(
                f"ranks planned different changes: versions {first.version} and {summary.version}; nothing was "
                "written. Prepare again",
                version=first.version,
                undone=True,
            )
    for tensor, sent in first.sent.items():
        written = sum(summary.owned[tensor] for summary in summaries)
        if written != sent:
            raise ApplyFailed(
                f"version {first.version} sets {sent} elements of {names(tensor)!r}, the ranks would write {written} "
                "of them; nothing was written. Reload the engine",
                version=first.version,
                tensor=names(tensor),
                expected=sent,
                got=written,
                undone=True,
            )
        if before is None or after is None:
            continue
        delta = sum((summary.deltas[tensor] for summary in summaries), ZERO)
        if before[tensor] + delta != after[tensor]:
            raise DigestMismatch(
                f"live {names(tensor)!r} would not become version {first.version}: its digest would be "
                f"{before[tensor] + delta}, published is {after[tensor]}. Live weights or the patch are damaged; "
                "nothing was written. Reload the engine",
                tensor=names(tensor),
                version=first.version,
                expected=str(after[tensor]),
                got=str(before[tensor] + delta),
            )
