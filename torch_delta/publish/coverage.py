"""The proof that together all ranks' slices cover every change exactly once.

When attaching, the coordinator gathers which boxes each rank owns and proves that they cover every element of every
tensor once. From then on a version is sound if each slice lies inside a box its sender owns and no two slices of one
sender overlap: what different senders own is disjoint already.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch_delta.errors import CaptureError
from torch_delta.format.box import find_overlap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_delta.format.box import Box
    from torch_delta.format.schema import Schema

TensorBox = tuple[int, "Box"]
_NAMES_IN_ERROR = 10


class Ownership:
    """Which rank owns which boxes, proved to cover the schema.

    Args:
        schema: of the stream.
        by_rank: (tensor, box) pairs of every rank.
        constant: tensors that nobody owns because they never change.

    Raises:
        CaptureError: an element has no owner or two, or a box lies outside its tensor; names the tensors.
    """

    def __init__(
        self, schema: Schema, by_rank: Mapping[int, Sequence[TensorBox]], *, constant: Sequence[int] = ()
    ) -> None:
        self.constant = tuple(constant)
        self.by_rank = {rank: tuple(boxes) for rank, boxes in by_rank.items()}
        problems = _problems(schema, self.by_rank, frozenset(constant))
        if problems:
            shown = "; ".join(problems[:_NAMES_IN_ERROR])
            more = f" (and {len(problems) - _NAMES_IN_ERROR} more)" if len(problems) > _NAMES_IN_ERROR else ""
            raise CaptureError(
                f"the ranks do not own every element exactly once: {shown}{more}; every rank must build its change "
                "source from the same model and process group",
                problems=problems[:_NAMES_IN_ERROR],
            )
        self._schema = schema
        self._exact = {rank: frozenset(boxes) for rank, boxes in self.by_rank.items()}
        self._of_tensor = {rank: _by_tensor(boxes) for rank, boxes in self.by_rank.items()}

    def objection(self, rank: int, slices: Iterable[TensorBox]) -> str | None:
        """Why the slices of a rank cannot be part of a version, or None if they can."""
        exact = self._exact.get(rank, frozenset())
        parts: dict[int, list[Box]] = defaultdict(list)
        seen: set[TensorBox] = set()
        for tensor, box in slices:
            if (tensor, box) not in exact:
                home = next((o for o in self._of_tensor.get(rank, {}).get(tensor, ()) if _contains(o, box)), None)
                if home is None:
                    return f"{self._name(tensor)}: rank {rank} sent {_text(box)}, which it does not own"
            elif (tensor, box) in seen:
                return f"{self._name(tensor)}: rank {rank} sent {_text(box)} twice"
            seen.add((tensor, box))
            parts[tensor].append(box)
        for tensor, boxes in parts.items():
            clash = find_overlap(boxes) if len(boxes) > 1 else None
            if clash is not None:
                first, second = (_text(boxes[at]) for at in clash)
                return f"{self._name(tensor)}: rank {rank} sent overlapping slices {first} and {second}"
        return None

    def _name(self, tensor: int) -> str:
        return self._schema.tensors[tensor].name if tensor < len(self._schema.tensors) else f"tensor {tensor}"


def _problems(schema: Schema, by_rank: Mapping[int, Sequence[TensorBox]], constant: frozenset[int]) -> list[str]:
    boxes: dict[int, list[Box]] = defaultdict(list)
    for rank, owned in by_rank.items():
        for tensor, box in owned:
            if not 0 <= tensor < len(schema.tensors):
                return [f"rank {rank} owns part of tensor number {tensor}, of {len(schema.tensors)}"]
            boxes[tensor].append(box)
    found = []
    for tensor, spec in enumerate(schema.tensors):
        mine = boxes.get(tensor, [])
        if spec.alias_of is not None or tensor in constant:
            if mine:
                found.append(f"{spec.name} is an alias or constant and yet a rank owns a part of it")
            continue
        outside = next((box for box in mine if not box.fits(spec.shape)), None)
        clash = find_overlap(mine) if outside is None else None
        covered = sum(box.numel for box in mine)
        if outside is not None:
            found.append(f"{spec.name}: box {_text(outside)} lies outside its shape {list(spec.shape)}")
        elif clash is not None:
            first, second = (_text(mine[at]) for at in clash)
            found.append(f"{spec.name}: boxes {first} and {second} overlap")
        elif covered != spec.numel:
            found.append(f"{spec.name}: {covered} of {spec.numel} elements have an owner")
    return found


def _by_tensor(boxes: Iterable[TensorBox]) -> dict[int, list[Box]]:
    found: dict[int, list[Box]] = defaultdict(list)
    for tensor, box in boxes:
        found[tensor].append(box)
    return found


def _contains(outer: Box, inner: Box) -> bool:
    if len(outer.shape) != len(inner.shape):
        return False
    ends = zip(outer.offset, outer.shape, inner.offset, inner.shape, strict=True)
    return all(at <= start and start + size <= at + extent for at, extent, start, size in ends)


def _text(box: Box) -> str:
    spans = ", ".join(f"{at}:{at + size}" for at, size in zip(box.offset, box.shape, strict=True))
    return f"[{spans}]"
