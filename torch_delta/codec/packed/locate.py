"""Gaps within classes to positions and new bits, by walking over the reader's own old bits."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.addresses import address
from torch_delta.codec.packed import kernels_locate
from torch_delta.codec.packed.classes import NO_CLASSES, NUM_CLASSES, Exponent, exponent_of
from torch_delta.codec.packed.head import MASK
from torch_delta.codec.packed.steps import stepped
from torch_delta.errors import DigestMismatch
from torch_delta.format.checks import broken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.codec.bits import Bits
    from torch_delta.codec.packed.gather import Run
    from torch_delta.format.schema import TensorSpec

_Ints = npt.NDArray[np.int64]


class Located(NamedTuple):
    """What the slices of a run set, one after the other and each in row-major order.

    Attributes:
        positions: in the box of the slice, row-major, strictly increasing, uint32 `[count]`.
        old: the reader's own bits there.
        new: bits after.
    """

    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits

    def part(self, begin: int, end: int) -> Located:
        """The elements from one place to another; views."""
        return Located(self.positions[begin:end], self.old[begin:end], self.new[begin:end])


def locate(run: Run, specs: Sequence[TensorSpec], regions: Sequence[Bits], *, key: str) -> Located:
    """Positions and new bits of the slices of a run.

    Args:
        run: from `gather`.
        specs: of the tensor of each slice.
        regions: own bits of the box of each slice before, flat and contiguous; only read.
        key: of the part, for messages.

    Raises:
        FormatError: a position outside the box, or a boundary outside the dtype's exponents (rules E8, E9).
        DigestMismatch: a position outside its class, so that the old bits here are not the writer's.
    """
    exponents = [exponent_of(spec.dtype) for spec in specs]
    _check_boundaries(run, specs, exponents, key)
    located = Located(np.empty_like(run.gaps), np.empty_like(run.steps), np.empty_like(run.steps))
    populations, found = np.zeros((run.num_slices, NUM_CLASSES), np.int64), np.zeros(run.num_slices, np.int64)
    counts, is_flat, width = np.diff(run.starts), run.heads.boundaries == NO_CLASSES, run.steps.itemsize
    numels = np.array([region.size for region in regions], np.int64)
    slices = None
    for compiled, chosen, work in (
        (kernels_locate.LOCATE_FLAT[width], is_flat, counts),
        (kernels_locate.LOCATE[width], ~is_flat, numels),
    ):
        if not chosen.any():
            continue
        kernel = compiled.get(int(work[chosen].sum()))
        if kernel is None:
            for number in np.flatnonzero(chosen).tolist():
                found[number] = _locate_numpy(
                    run, number, exponents[number], regions[number], located, populations[number]
                )
            continue
        if slices is None:
            slices = _rows(run, exponents, regions)
        kernel(slices, run.heads.lists, run.starts, run.gaps, run.steps, *located, populations, found)
    _check_found(run, specs, populations, found == counts, key)
    return located


def _check_boundaries(run: Run, specs: Sequence[TensorSpec], exponents: Sequence[Exponent], key: str) -> None:
    """Rule E8: classes begin at an exponent that the dtype has."""
    for boundary, spec, exponent in zip(run.heads.boundaries.tolist(), specs, exponents, strict=True):
        if boundary != NO_CLASSES and boundary >= exponent.num_exponents - (exponent.num_bits == 0):
            raise broken(
                "E8",
                key,
                f"{spec.name}: classes begin at exponent {boundary}, {spec.dtype} has {exponent.num_exponents}",
            )


def _rows(run: Run, exponents: Sequence[Exponent], regions: Sequence[Bits]) -> _Ints:
    """How kernels see the slices, see `kernels_locate.LOCATE`."""
    return np.array(
        [
            (address(region), region.size, boundary, exponent.shift, exponent.magnitude, exponent.sign_magnitude)
            for region, boundary, exponent in zip(regions, run.heads.boundaries.tolist(), exponents, strict=True)
        ],
        np.int64,
    )


def _check_found(
    run: Run, specs: Sequence[TensorSpec], populations: _Ints, is_found: npt.NDArray[np.bool_], key: str
) -> None:
    """Refuse the first slice with a position outside its class, or with a mask that is not as long as its class."""
    modes, stated = run.heads.lists[:, 1], run.heads.lists[:, 2]
    is_good = is_found & ((modes != MASK) | (stated == populations)).all(axis=1)
    if is_good.all():
        return
    number = int(np.argmin(is_good))
    name, own = specs[number].name, populations[number].tolist()
    if run.heads.boundaries[number] == NO_CLASSES:
        raise broken("E9", key, f"{name}: a position outside its box of {own[0]} elements")
    raise DigestMismatch(
        f"{key}: {name!r} here has other numbers of elements by exponent than the delta was made from; "
        "nothing was written. Start again from an anchor or a fresh copy of the base (rule E6)",
        rule="E6",
        tensor=name,
        key=key,
        expected=tuple(stated[number].tolist()),
        got=tuple(own),
    )


def _locate_numpy(  # noqa: PLR0917 - one caller
    run: Run, number: int, exponent: Exponent, region: Bits, located: Located, populations: _Ints
) -> int:
    """The reference of both kernels, for one slice; returns how many elements were found, or -1."""
    begin, end = run.starts[number : number + 2].tolist()
    gaps, steps, boundary = run.gaps[begin:end], run.steps[begin:end], int(run.heads.boundaries[number])
    classes = None if boundary == NO_CLASSES else exponent.classes(region, boundary)
    if classes is None:
        populations[0] = region.size
    else:
        populations[:] = np.bincount(classes, minlength=NUM_CLASSES)
    cuts = np.cumsum([0, *run.heads.lists[number, 0].tolist()]).tolist()
    places = []
    for own, (first, last) in enumerate(pairwise(cuts)):
        if last > first:
            ranks = np.cumsum(gaps[first:last].astype(np.int64) + 1) - 1
            if int(ranks[-1]) >= populations[own]:
                return -1
            places.append(ranks if classes is None else np.flatnonzero(classes == own)[ranks])
    index = np.concatenate(places)
    order = np.argsort(index, kind="stable")
    here = located.part(begin, end)
    here.positions[:] = index[order]
    here.old[:] = region[index[order]]
    here.new[:] = stepped(here.old, steps[order], sign_magnitude=exponent.sign_magnitude)
    return index.size
