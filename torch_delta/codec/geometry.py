"""Where the elements of a box lie in the flat order of the full tensor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_delta.codec.bits import Index
    from torch_delta.format.box import Box


@dataclass(frozen=True, slots=True)
class Layout:
    """A box as nested steps over the flat order of its tensor, with as few steps as possible.

    Attributes:
        first: flat index of the first element.
        steps: ``(stride, length)`` from the outermost to the innermost; the innermost has stride 1.
    """

    first: int
    steps: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, box: Box, full_shape: Sequence[int]) -> Layout:
        """Layout of a box that is not empty.

        Raises:
            ValueError: the box is empty or does not fit the tensor.
        """
        if not box.fits(full_shape) or not box.numel:
            raise ValueError(f"box {box.offset} {box.shape} is empty or outside a tensor of shape {tuple(full_shape)}")
        first = 0
        stride = 1
        steps: list[tuple[int, int]] = [(1, 1)]
        for at, extent, full in zip(reversed(box.offset), reversed(box.shape), reversed(full_shape), strict=True):
            first += at * stride
            inner_stride, inner_length = steps[-1]
            if extent > 1:
                if stride == inner_stride * inner_length:
                    steps[-1] = (inner_stride, inner_length * extent)
                else:
                    steps.append((stride, extent))
            stride *= full
        return cls(first, tuple(reversed(steps)))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """The box as groups of equal rows at equal distances, in box-local order.

        Yields:
            ``(flat start, number of rows, elements per row, distance between row starts)``.
        """
        *outer, (_, length) = self.steps
        stride, num_rows = outer.pop() if outer else (length, 1)
        for offsets in product(*(range(0, step * count, step) for step, count in outer)):
            yield self.first + sum(offsets), num_rows, length, stride

    @property
    def row_elements(self) -> int:
        """Elements in one of the groups of `rows`."""
        return prod(length for _, length in self.steps[-2:])

    def flat_index(self, index: Index) -> npt.NDArray[np.int64]:
        """Flat indices in the full tensor of box-local indices, which must lie inside the box."""
        rest = index.astype(np.int64)
        if len(self.steps) == 1:
            rest += self.first
            return rest
        flat = np.full_like(rest, self.first)
        for stride, length in reversed(self.steps[1:]):
            rest, here = np.divmod(rest, length)
            flat += here * stride
        flat += rest * self.steps[0][0]
        return flat
