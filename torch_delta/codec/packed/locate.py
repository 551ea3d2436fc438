"""Gaps within classes to positions and new bits, by walking over the reader's own old bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.packed import kernels
from torch_delta.codec.packed.classes import NO_CLASSES, NUM_CLASSES, Exponent, exponent_of
from torch_delta.codec.packed.head import MASK
from torch_delta.codec.packed.steps import stepped
from torch_delta.errors import DigestMismatch
from torch_delta.format.checks import broken

if TYPE_CHECKING:
    from torch_delta.codec.bits import Bits
    from torch_delta.codec.packed.gather import Gathered
    from torch_delta.format.schema import TensorSpec


class Located(NamedTuple):
    """What a slice sets, in row-major order.

    Attributes:
        positions: in the box, row-major, strictly increasing, uint32 `[count]`.
        old: the reader's own bits there.
        new: bits after.
    """

    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits


def locate(gathered: Gathered, spec: TensorSpec, region: Bits, *, key: str) -> Located:
    """Positions and new bits of a slice.

    Args:
        gathered: the slice.
        spec: of its tensor.
        region: own bits of the slice's box before, flat and contiguous; only read.
        key: of the part, for messages.

    Raises:
        FormatError: a position outside the box, or a boundary outside the dtype's exponents (rules E8, E9).
        DigestMismatch: a position outside its class, so that the old bits here are not the writer's.
    """
    exponent, boundary = exponent_of(spec.dtype), gathered.head.boundary
    if boundary != NO_CLASSES and boundary >= exponent.num_exponents - (exponent.num_bits == 0):
        raise broken(
            "E8", key, f"{spec.name}: classes begin at exponent {boundary}, {spec.dtype} has {exponent.num_exponents}"
        )
    if boundary == NO_CLASSES:
        found = _locate_flat(gathered, region, sign_magnitude=exponent.sign_magnitude)
        populations = np.array([region.size])
        if found is None or (gathered.head.modes[0] == MASK and gathered.head.populations[0] != region.size):
            raise broken("E9", key, f"{spec.name}: a position outside its box of {region.size} elements")
    else:
        kernel = kernels.LOCATE[region.itemsize].get(region.size)
        populations = np.empty(NUM_CLASSES, np.int64)
        if kernel is None:
            found = _locate_numpy(gathered, exponent, region, populations)
        else:
            index = np.empty(gathered.gaps.size, np.uint32)
            found = Located(index, np.empty_like(gathered.steps), np.empty_like(gathered.steps))
            num_found = kernel(
                region,
                *exponent.tables(boundary),
                np.array(gathered.head.counts, np.int64),
                gathered.gaps,
                gathered.steps,
                *found,
                populations,
            )
            found = found if num_found == index.size else None
    declared = zip(gathered.head.modes, gathered.head.populations, populations.tolist(), strict=True)
    if found is None or any(mode == MASK and stated != own for mode, stated, own in declared):
        raise DigestMismatch(
            f"{key}: {spec.name!r} here has other numbers of elements by exponent than the delta was made from; "
            "nothing was written. Start again from an anchor or a fresh copy of the base (rule E6)",
            rule="E6",
            tensor=spec.name,
            key=key,
            expected=gathered.head.populations,
            got=tuple(populations.tolist()),
        )
    return found


def _locate_flat(gathered: Gathered, region: Bits, *, sign_magnitude: bool) -> Located | None:
    """For one class; None where a position is outside the box."""
    kernel = kernels.LOCATE_FLAT[region.itemsize].get(gathered.gaps.size)
    if kernel is not None:
        index = np.empty(gathered.gaps.size, np.uint32)
        found = Located(index, np.empty_like(gathered.steps), np.empty_like(gathered.steps))
        return found if kernel(region, sign_magnitude, gathered.gaps, gathered.steps, *found) == index.size else None
    return _locate_flat_numpy(gathered, region, sign_magnitude=sign_magnitude)


def _locate_flat_numpy(gathered: Gathered, region: Bits, *, sign_magnitude: bool) -> Located | None:
    """The reference of `kernels.LOCATE_FLAT`."""
    index = np.cumsum(gathered.gaps.astype(np.int64) + 1) - 1
    if int(index[-1]) >= region.size:
        return None
    old = region[index]
    return Located(index.astype(np.uint32), old, stepped(old, gathered.steps, sign_magnitude=sign_magnitude))


def _locate_numpy(
    gathered: Gathered, exponent: Exponent, region: Bits, populations: npt.NDArray[np.int64]
) -> Located | None:
    """The reference of `kernels.LOCATE`; None where a position is outside its class."""
    classes = exponent.classes(region, gathered.head.boundary)
    populations[:] = np.bincount(classes, minlength=NUM_CLASSES)
    places = []
    at = 0
    for number, count in enumerate(gathered.head.counts):
        if count:
            ranks = np.cumsum(gathered.gaps[at : at + count].astype(np.int64) + 1) - 1
            if int(ranks[-1]) >= populations[number]:
                return None
            places.append(np.flatnonzero(classes == number)[ranks])
            at += count
    index = np.concatenate(places)
    order = np.argsort(index, kind="stable")
    index = index[order]
    old = region[index]
    new = stepped(old, gathered.steps[order], sign_magnitude=exponent.sign_magnitude)
    return Located(index.astype(np.uint32), old, new)
