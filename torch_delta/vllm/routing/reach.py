"""What the ranks of an engine hold together: the decision which tensors are routed, the same on every rank.

Each rank probes alone and learns which elements *it* holds. Only all ranks together can say that every element lands
exactly once, and who counts the elements that several ranks hold (KV heads under tensor parallelism, norms).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torch_delta.format.box import Box, find_overlap
from torch_delta.vllm.routing.affine import Dim, Piece
from torch_delta.vllm.routing.boxes import common_shape, place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.format.schema import Schema
    from torch_delta.vllm.routing.memory import LiveMemory, Storage
    from torch_delta.vllm.routing.probe import Seen

_Region = tuple[int, tuple[tuple[int, int], ...]]  # source, (size, source stride) of each loop


class Held(NamedTuple):
    """Elements of one checkpoint tensor that a rank holds.

    Attributes:
        regions: ``(first flat position, ((size, stride), ...))``, each landing once.
        reason: why the rank cannot route the tensor, or None.
    """

    regions: tuple[_Region, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class Reach:
    """What one rank holds; small, and picklable.

    Attributes:
        held: per name of the schema, in schema order.
    """

    held: tuple[Held, ...]

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> Reach:
        """Of what a rank's probe saw."""
        return cls(
            tuple(
                Held(
                    tuple(
                        (piece.source, tuple((dim.size, dim.source) for dim in piece.dims)) for _, piece in one.pieces
                    ),
                    one.reason,
                )
                for one in seen
            )
        )


@dataclass(frozen=True, slots=True)
class Route:
    """Elements of a tensor and where this rank keeps them.

    Attributes:
        tensor: schema index.
        storage: they lie in.
        piece: the map.
        shape: of the tensor, in the finer form in which the piece is a box.
        box: of the piece, in that shape.
        strides: in the storage, in elements, per dim of the box.
        owned: whether this rank counts these elements in digests.
    """

    tensor: int
    storage: Storage
    piece: Piece
    shape: tuple[int, ...]
    box: Box
    strides: tuple[int, ...]
    owned: bool


@dataclass(frozen=True, slots=True)
class Settlement:
    """The table of one rank.

    Attributes:
        routes: of every routed tensor, by schema index; empty where this rank holds nothing of it.
        unrouted: why a tensor goes by the reload path.
        ignored: why a tensor need not be applied at all.
    """

    routes: Mapping[int, tuple[Route, ...]]
    unrouted: Mapping[int, str]
    ignored: Mapping[int, str]


class _Plan(NamedTuple):
    """What `_combine` found for one feed: the boxes of every rank, and the lowest rank that holds each."""

    boxes: tuple[tuple[Box, ...], ...]
    owners: Mapping[Box, int]


def settle(schema: Schema, seen: Sequence[Seen], memory: LiveMemory, reaches: Sequence[Reach], rank: int) -> Settlement:
    """Decide about every tensor; a pure function of `reaches` but for the routes, which are this rank's.

    Args:
        schema: of the stream.
        seen: by this rank's probe.
        memory: of this rank.
        reaches: of all ranks, in rank order.
        rank: of this one.
    """
    feeds: dict[int, list[int]] = {}
    for feed, one in enumerate(seen):
        feeds.setdefault(one.tensor, []).append(feed)
    routes: dict[int, tuple[Route, ...]] = {}
    unrouted: dict[int, str] = {}
    ignored: dict[int, str] = {}
    for tensor in schema.data_indices:
        spec = schema.tensors[tensor]
        mine = sorted(feeds[tensor], key=lambda feed: (feed != tensor, feed))  # its own name first, then its aliases
        reason = _reason(mine, reaches)
        if reason is not None:
            unrouted[tensor] = reason
            continue
        shape = common_shape(spec.shape, [_dims(region) for region in _regions(mine, reaches)]) if spec.numel else ()
        if shape is None:
            unrouted[tensor] = "its loader takes it apart in steps that do not divide each other"
            continue
        if not any(True for _ in _regions(mine, reaches)):
            if spec.numel:
                ignored[tensor] = "load_weights takes it and stores it nowhere"
            else:
                routes[tensor] = ()
            continue
        plans: dict[int, _Plan] = {}
        for feed in mine:
            plan = _combine(spec.numel, shape, tuple(reach.held[feed].regions for reach in reaches))
            if isinstance(plan, str):
                unrouted[tensor] = plan
                break
            if plan is not None:
                plans[feed] = plan
        else:
            routes[tensor] = _routes(tensor, shape, plans, seen, memory, rank)
    return Settlement(routes, unrouted, ignored)


def _reason(feeds: Sequence[int], reaches: Sequence[Reach]) -> str | None:
    for rank, reach in enumerate(reaches):
        for feed in feeds:
            reason = reach.held[feed].reason
            if reason is not None:
                return reason if len(reaches) == 1 else f"{reason} (rank {rank})"
    return None


def _regions(feeds: Sequence[int], reaches: Sequence[Reach]) -> list[_Region]:
    return [region for reach in reaches for feed in feeds for region in reach.held[feed].regions]


def _dims(region: _Region) -> tuple[Dim, ...]:
    return tuple(Dim(size, stride, 0) for size, stride in region[1])


@lru_cache(maxsize=1 << 12)  # the layers of a model are alike
def _combine(numel: int, shape: tuple[int, ...], regions: tuple[tuple[_Region, ...], ...]) -> _Plan | str | None:
    boxes: list[tuple[Box, ...]] = []
    owners: dict[Box, int] = {}
    for rank, of_rank in enumerate(regions):
        placed = [place(Piece(region[0], 0, _dims(region)), shape) for region in of_rank]
        found = [one.box for one in placed if one is not None]
        if len(found) < len(placed):
            return "its loader cuts it in the middle of rows"
        if find_overlap(found) is not None:
            return "one element lands in several places"
        boxes.append(tuple(found))
        for box in found:
            owners.setdefault(box, rank)
    if not owners:
        return None
    if find_overlap(list(owners)) is not None:
        return "ranks hold parts of it that overlap without being the same"
    landed = sum(box.numel for box in owners)
    if landed != numel:
        return f"only {landed} of its {numel} elements land anywhere"
    return _Plan(tuple(boxes), owners)


def _routes(  # noqa: PLR0917 - one caller
    tensor: int,
    shape: tuple[int, ...],
    plans: Mapping[int, _Plan],
    seen: Sequence[Seen],
    memory: LiveMemory,
    rank: int,
) -> tuple[Route, ...]:
    """This rank's routes; the first name that lands is the one whose elements are counted."""
    counted = next(iter(plans))
    found: dict[tuple[int, Piece], Route] = {}
    for feed, plan in plans.items():
        for (storage, piece), box in zip(seen[feed].pieces, plan.boxes[rank], strict=True):
            placed = place(piece, shape)
            assert placed is not None
            assert placed.box == box
            owned = feed == counted and plan.owners[box] == rank
            route = Route(tensor, memory.storages[storage], piece, shape, box, placed.strides, owned)
            found.setdefault((storage, piece), route)  # an alias may land where its tensor does
    return tuple(found.values())
