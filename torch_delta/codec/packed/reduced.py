"""From changed elements to lists of gaps and steps, one list per class: everything of `packed` that needs old bits.

    index, old, new, region ──classes of the old exponents──▶ ranks within each class ──▶ gaps;  old, new ──▶ steps

A trainer reduces while the bits of the whole box are at hand; what is left is O(changed) and is entropy coded in the
background. `Reduced` has the same form in both profiles: *small* has `NUM_CLASSES` lists, *fast* has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import Bits, Index, check_bits, index_dtype
from torch_delta.codec.packed import kernels
from torch_delta.codec.packed.classes import (
    NO_CLASSES,
    NUM_CLASSES,
    Exponent,
    choose_boundary,
    exponent_of,
)
from torch_delta.codec.packed.pieces import cut_index, local_index
from torch_delta.codec.packed.steps import steps

if TYPE_CHECKING:
    from torch_delta.format.box import Box

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """The changes of one piece of a box, grouped by class and in row-major order inside a class.

    Attributes:
        start: place of the piece's first element in the box.
        boundary: exponent at which the classes begin, or `NO_CLASSES`.
        counts: changed elements of each class, int64 `[NUM_CLASSES]`.
        populations: all elements of each class, int64 `[NUM_CLASSES]`.
        gaps: unchanged elements of the same class before each changed one, uint32 `[count]`.
        steps: see `steps.py`, unsigned of the element's width `[count]`.
    """

    start: int
    boundary: int
    counts: Counts
    populations: Counts
    gaps: npt.NDArray[np.uint32]
    steps: Bits

    @property
    def count(self) -> int:
        """Changed elements."""
        return self.steps.size


def reduce_change(  # noqa: PLR0917 - the fields of a Change, and the region
    dtype: str, box: Box, index: Index | None, old: Bits, new: Bits, region: Bits
) -> tuple[Reduced, ...]:
    """Reduce the changes of a box for profile *small*.

    Thread-safe; releases the GIL where numba is installed. Extra memory: O(changed), and without numba a few times the
    bytes of one piece (8 MiB).

    Args:
        dtype: safetensors spelling.
        box: that the change is about.
        index: box-local positions, strictly increasing; None: every element.
        old: bits before, `[count]`.
        new: bits after, `[count]`.
        region: bits of the whole box, `[numel]` or of the box's shape, from before or after the change: what it holds
            at `index` does not matter. Only read, and only during the call.

    Returns:
        One entry per piece in which something changed, ascending.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    check_bits(region, "region")
    if region.size != box.numel or not region.dtype == old.dtype == new.dtype or old.shape != new.shape:
        raise ValueError(
            f"region is {region.dtype} {region.shape} for a box of shape {box.shape}; old is {old.dtype} {old.shape}, "
            f"new is {new.dtype} {new.shape}"
        )
    positions = np.arange(box.numel, dtype=index_dtype(box.numel)) if index is None else index
    flat = np.ascontiguousarray(region).reshape(-1)
    exponent = exponent_of(dtype)
    found = []
    for piece, begin, end in cut_index(box, old.itemsize, positions):
        here = local_index(positions[begin:end], piece.start)
        found.append(
            reduce_piece(
                exponent, here, old[begin:end], new[begin:end], flat[piece.start : piece.stop], start=piece.start
            )
        )
    return tuple(found)


class Flat(NamedTuple):
    """The changes of one piece for profile *fast*: one class, so that nothing of its region is needed.

    Attributes:
        positions: in the piece, strictly increasing, uint32 `[count]`.
        old: bits before, `[count]`.
        new: bits after, `[count]`.
        numel: elements of the piece.
        sign_magnitude: see `Exponent`.
    """

    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits
    numel: int
    sign_magnitude: bool


def reduce_gaps(flat: Flat, *, start: int = 0) -> Reduced:
    """The same with gaps and steps written out.

    Args:
        flat: the changes.
        start: of the piece in its box.
    """
    first = np.zeros((2, NUM_CLASSES), np.int64)
    first[:, 0] = flat.positions.size, flat.numel
    gaps = flat.positions.copy()
    gaps[1:] -= flat.positions[:-1]
    gaps[1:] -= np.uint32(1)
    return Reduced(
        start=start,
        boundary=NO_CLASSES,
        counts=first[0],
        populations=first[1],
        gaps=gaps,
        steps=steps(flat.old, flat.new, sign_magnitude=flat.sign_magnitude),
    )


def reduce_piece(
    exponent: Exponent, index: npt.NDArray[np.uint32], old: Bits, new: Bits, region: Bits, *, start: int
) -> Reduced:
    """Reduce one piece for profile *small*; see `reduce_change`.

    Args:
        exponent: of the dtype.
        index: positions in the piece, strictly increasing.
        old: bits before, `[count]`.
        new: bits after, `[count]`.
        region: bits of the piece, flat and contiguous.
        start: of the piece.
    """
    boundary = choose_boundary(exponent, region, old)
    if boundary == NO_CLASSES:
        return reduce_gaps(Flat(index, old, new, region.size, exponent.sign_magnitude), start=start)
    kernel = kernels.RANK[region.itemsize].get(region.size)
    if kernel is None:
        return _reduce_numpy(exponent, boundary, index, old, new, region, start)
    counts, populations = np.empty((2, NUM_CLASSES), np.int64)
    gaps, step = np.empty(index.size, np.uint32), np.empty_like(old)
    kernel(
        region,
        index,
        np.ascontiguousarray(old),
        np.ascontiguousarray(new),
        *exponent.tables(boundary),
        gaps,
        step,
        counts,
        populations,
    )
    return Reduced(start=start, boundary=boundary, counts=counts, populations=populations, gaps=gaps, steps=step)


def _reduce_numpy(  # noqa: PLR0917 - one caller
    exponent: Exponent,
    boundary: int,
    index: npt.NDArray[np.uint32],
    old: Bits,
    new: Bits,
    region: Bits,
    start: int,
) -> Reduced:
    """The reference of `kernels.RANK`."""
    classes = exponent.classes(old, boundary)
    of_all = exponent.classes(region, boundary)
    of_all[index] = classes
    is_changed = np.zeros(region.size, bool)
    is_changed[index] = True
    gaps = []
    for number in range(NUM_CLASSES):
        ranks = np.flatnonzero(is_changed[of_all == number])
        gaps.append(np.diff(ranks, prepend=-1) - 1)
    by_class = np.argsort(classes, kind="stable")
    return Reduced(
        start=start,
        boundary=boundary,
        counts=np.bincount(classes, minlength=NUM_CLASSES),
        populations=np.bincount(of_all, minlength=NUM_CLASSES),
        gaps=np.concatenate(gaps).astype(np.uint32),
        steps=steps(old[by_class], new[by_class], sign_magnitude=exponent.sign_magnitude),
    )
