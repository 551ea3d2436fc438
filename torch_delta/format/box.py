"""Boxes: axis-aligned regions of a tensor, in the coordinates of the full tensor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from torch_delta.format.checks import broken
from torch_delta.format.limits import MAX_BOX_COMPARISONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_delta.format.schema import TensorSpec


@dataclass(frozen=True, slots=True)
class Box:
    """A region of a tensor; elements inside it are numbered row-major, *box-local*.

    Attributes:
        offset: first index per dim.
        shape: extent per dim; a 0-dim tensor has one box, ``Box((), ())``, of one element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box has one offset and one extent per dim, got {self.offset} and {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is a full tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    def is_whole(self, spec: TensorSpec) -> bool:
        """Whether the box is the full tensor."""
        return self.shape == spec.shape and not any(self.offset)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(shape) == len(self.offset) and all(
            at >= 0 and extent >= 0 and at + extent <= full
            for at, extent, full in zip(self.offset, self.shape, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        """Whether the two share an element."""
        return all(
            max(a, c) < min(a + b, c + d)
            for a, b, c, d in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def runs(self, full_shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The box as maximal contiguous runs of the full tensor, ascending.

        Args:
            full_shape: of the tensor; the box must fit.

        Yields:
            ``(flat start in the full tensor, flat start in the box, length)``, in elements.
        """
        if not self.fits(full_shape):
            raise ValueError(f"box {self.offset} + {self.shape} does not fit a tensor of shape {tuple(full_shape)}")
        if not self.numel:
            return
        strides = [1] * len(full_shape)
        for dim in range(len(full_shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * full_shape[dim + 1]
        # `split` is the innermost dim the box does not span: everything from it inwards is one run.
        split = len(full_shape) - 1
        while split > 0 and self.shape[split] == full_shape[split]:
            split -= 1
        length = prod(self.shape[max(split, 0) :])
        first = sum(at * stride for at, stride in zip(self.offset, strides, strict=True))
        if split <= 0:
            yield first, 0, length
            return
        steps = [range(0, extent * stride, stride) for extent, stride in zip(self.shape, strides, strict=True)][:split]
        for number, outer in enumerate(product(*steps)):
            yield first + sum(outer), number * length, length


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two positions in `boxes` that share an element, or None if no two do.

    Boxes of one mesh separate along some dim, which takes O(n log n); what is left is compared pair by pair within a
    budget, so that a hostile table cannot cost quadratic time.

    Raises:
        FormatError: the budget is spent (rule P1).
    """
    budget = MAX_BOX_COMPARISONS
    todo = [[at for at, box in enumerate(boxes) if box.numel]]
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        pieces = _separate(boxes, group)
        pairs = len(group) * (len(group) - 1) // 2 if len(pieces) == 1 else 0
        budget -= len(group) + pairs
        if budget < 0:
            raise broken("P1", "boxes", f"{len(boxes)} boxes of one tensor are too entangled to be checked")
        if len(pieces) > 1:
            todo += pieces
            continue
        for place, first in enumerate(group):
            for second in group[place + 1 :]:
                if boxes[first].overlaps(boxes[second]):
                    return min(first, second), max(first, second)
    return None


def _separate(boxes: Sequence[Box], group: list[int]) -> list[list[int]]:
    """Split a group where a hyperplane of some dim crosses no box; the group itself if there is none."""
    for dim in range(len(boxes[group[0]].offset)):
        ordered = sorted(group, key=lambda at: boxes[at].offset[dim])
        pieces: list[list[int]] = []
        end = -1
        for at in ordered:
            start = boxes[at].offset[dim]
            if start >= end:
                pieces.append([])
            pieces[-1].append(at)
            end = max(end, start + boxes[at].shape[dim])
        if len(pieces) > 1:
            return pieces
    return [group]


def covers(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes hold every element of a tensor of this shape exactly once."""
    return (
        all(box.fits(shape) for box in boxes)
        and sum(box.numel for box in boxes) == prod(shape)
        and find_overlap(boxes) is None
    )


def check_disjoint(boxes: Sequence[Box], *, name: str) -> None:
    """Check that no two boxes of one tensor overlap (rule P1).

    Args:
        boxes: in any order.
        name: of the tensor, for messages.

    Raises:
        FormatError: two do, or there are too many to be told apart within the budget.
    """
    pair = find_overlap(boxes)
    if pair is not None:
        first, second = (boxes[at] for at in pair)
        raise broken(
            "P1",
            name,
            f"two boxes overlap: at {first.offset} of shape {first.shape}, at {second.offset} of shape {second.shape}",
            tensor=name,
        )
