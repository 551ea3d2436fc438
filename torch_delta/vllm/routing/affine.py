"""Affine maps between the flat order of a checkpoint tensor and the memory of a live parameter.

A `Piece` says where a strided region of a tensor lies in a storage. Loaders narrow, transpose and copy, so almost every
tensor is one piece after `merge`, and usually one contiguous run. Everything here is plain integers: no tensor is seen.

All offsets, sizes and strides count elements.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MERGE_PERIODS = (1, 2, 3)  # gate and up may alternate in the checkpoint and change places in memory; q, k and v too
_MERGE_ROUNDS = 4  # each round can find one more level of loops (experts, gate and up, heads, ...)


class NotAffine(Exception):
    """A region that no `Piece` describes; the message says why, as the middle of a sentence."""


class Dim(NamedTuple):
    """One loop of a piece.

    Attributes:
        size: iterations, at least 2.
        source: stride in the flat order of the checkpoint tensor.
        target: stride in the storage.
    """

    size: int
    source: int
    target: int


class Piece(NamedTuple):
    """Elements of a checkpoint tensor and where they lie in a storage.

    Element ``source + sum(i_k * dims[k].source)`` of the tensor lies at ``target + sum(i_k * dims[k].target)``.

    Attributes:
        source: flat position of the first element in the tensor.
        target: flat position of the first element in the storage.
        dims: by descending source stride; nested, so that every source position has one multi-index at most.
    """

    source: int
    target: int
    dims: tuple[Dim, ...]

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return prod(dim.size for dim in self.dims)

    @property
    def source_end(self) -> int:
        """One past the highest source position."""
        return self.source + sum((dim.size - 1) * dim.source for dim in self.dims) + 1

    @property
    def target_end(self) -> int:
        """One past the highest position in the storage."""
        return self.target + sum((dim.size - 1) * dim.target for dim in self.dims) + 1


def make_piece(source: int, target: int, dims: Iterable[tuple[int, int, int]]) -> Piece:
    """Put loops into the one form in which equal maps compare equal.

    Args:
        source: position of the first element in the tensor.
        target: position of the first element in the storage.
        dims: ``(size, source stride, target stride)`` in any order, no size 0.

    Raises:
        NotAffine: an element would land in two places, or two in one.
    """
    loops = sorted((Dim(*dim) for dim in dims if dim[0] != 1), key=lambda dim: (-dim.source, -dim.target))
    if not _nested((dim.size, dim.source) for dim in loops):
        raise NotAffine("one element lands in several places")
    if not _nested((dim.size, dim.target) for dim in sorted(loops, key=lambda dim: -dim.target)):
        raise NotAffine("several elements land in one place")
    merged: list[Dim] = []
    for inner in reversed(loops):
        outer = merged[-1] if merged else None
        if outer and inner.source == outer.source * outer.size and inner.target == outer.target * outer.size:
            merged[-1] = Dim(outer.size * inner.size, outer.source, outer.target)
        else:
            merged.append(inner)
    return Piece(source, target, tuple(reversed(merged)))


def _nested(loops: Iterable[tuple[int, int]]) -> bool:
    """Whether loops ``(size, stride)``, by descending stride, reach every position once."""
    reach = 0
    for size, stride in reversed(list(loops)):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """The same elements in fewer pieces: pieces of one form at equal distances become a loop. Duplicates go."""
    found = sorted(set(pieces), key=_order)
    for period in _MERGE_PERIODS:
        for _ in range(_MERGE_ROUNDS):
            before = len(found)
            parts = [_merge_once(found[part::period]) for part in range(period)]
            found = sorted((piece for part in parts for piece in part), key=_order)
            if len(found) == before:
                break
    return sorted(found, key=lambda piece: (piece.source, piece.target))


def _order(piece: Piece) -> tuple[tuple[Dim, ...], int, int]:
    return piece.dims, piece.source, piece.target


def _merge_once(pieces: list[Piece]) -> list[Piece]:
    done: list[Piece] = []
    at = 0
    while at < len(pieces):
        first = pieces[at]
        end = at + 1
        if end < len(pieces) and pieces[end].dims == first.dims:
            step = pieces[end].source - first.source, pieces[end].target - first.target
            while (
                end < len(pieces)
                and pieces[end].dims == first.dims
                and (pieces[end].source - pieces[end - 1].source, pieces[end].target - pieces[end - 1].target) == step
            ):
                end += 1
            try:
                done.append(make_piece(first.source, first.target, [(end - at, *step), *first.dims]))
            except NotAffine:  # they interleave in a way that loops do not express
                done += pieces[at:end]
        else:
            done.append(first)
        at = end
    return done


class Part(NamedTuple):
    """What one loop of a view does to one dim of what it views.

    Attributes:
        loop: number of the loop.
        dim: number of the dim.
        size: iterations.
        step: positions along the dim per iteration.
        every: iterations of the loop per iteration of this part.
    """

    loop: int
    dim: int
    size: int
    step: int
    every: int


def split(
    offset: int, loops: Sequence[tuple[int, int]], shape: Sequence[int]
) -> tuple[tuple[int, ...], list[Part]] | None:
    """A strided region in the coordinates of a row-major array.

    Args:
        offset: flat position of the first element.
        loops: ``(size, stride)``.
        shape: of the array.

    Returns:
        The first element's index per dim and how the loops move along the dims; None where a loop crosses the end of a
        dim in the middle, so that no such description exists.
    """
    strides = row_major(shape)
    start = tuple(offset // stride % extent for stride, extent in zip(strides, shape, strict=True))
    reach = list(start)
    parts: list[Part] = []
    for number, (size, stride) in enumerate(loops):
        if size == 1:
            continue
        left, every = size, 1
        dim = next((at for at, of_dim in enumerate(strides) if of_dim <= stride and shape[at] > 1), None)
        if dim is None or stride % strides[dim]:
            return None
        step = stride // strides[dim]
        while left > 1:
            room = shape[dim]
            here = left
            if reach[dim] + (left - 1) * step >= room:
                # The loop goes on in the next dim outwards; it must cross the border exactly.
                if step != 1 or reach[dim] or left % room or dim == 0:
                    return None
                here = room
            if here > 1:
                parts.append(Part(number, dim, here, step, every))
            reach[dim] += (here - 1) * step
            left //= here
            every *= here
            dim, step = dim - 1, 1
            while left > 1 and dim >= 0 and shape[dim] == 1:
                dim -= 1
            if left > 1 and dim < 0:
                return None
    return start, parts


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous array of this shape, all at least 1."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def refine(shape: Sequence[int], strides: Iterable[int]) -> tuple[int, ...] | None:
    """A shape of the same flat order in which regions with the given strides are boxes.

    A tensor ``[E, 2I, H]`` of which every second row goes elsewhere becomes ``[E, I, 2, H]``.

    Args:
        shape: of the tensor, not empty.
        strides: of all loops of all regions.

    Returns:
        The finer shape; None if the strides do not divide each other.
    """
    numel = prod(shape)
    own = {stride for stride, extent in zip(row_major(shape), shape, strict=True) if extent > 1}
    cuts = sorted(own | set(strides) | {1}, reverse=True)
    finer: list[int] = []
    above = numel
    for cut in cuts:
        if above % cut:
            return None
        if above > cut:
            finer.append(above // cut)
        above = cut
    return tuple(finer)
