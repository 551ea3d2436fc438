"""Classes of old exponents: which elements are likely to change, as far as the receiver knows too.

An optimizer step is about as large for every weight, so a weight changes in its stored precision the more often the
smaller it is: the chance roughly halves from one exponent to the next. Elements of a piece therefore fall into
`NUM_CLASSES` classes by their *old* exponent, and positions are counted within a class.

    class(u) = clip(exponent(u) - boundary, 0, NUM_CLASSES - 1)

Exponents lie above the mantissa: `exponent(u) = (u & magnitude) >> shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import log2
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import bits_dtype
from torch_delta.codec.packed.kernels_boundary import BOUNDARY
from torch_delta.format.encodings import NO_EXPONENT, PACKED_EXPONENT, PACKED_NUM_CLASSES

if TYPE_CHECKING:
    from torch_delta.codec.bits import Bits

NUM_CLASSES: Final = PACKED_NUM_CLASSES
NO_CLASSES: Final = -1
"""Boundary of a piece whose elements form one class."""

_MAX_CANDIDATES = 64
_SAMPLES_LOG2 = 15
_LIST_BITS = 26 << 16
"""What a list costs in the head of a frame, in 2**-16 bits: a count and a mode after compression."""
_MANTISSA_BITS = 10


@dataclass(frozen=True, slots=True)
class Exponent:
    """Where the exponent of a dtype lies, and how its elements are ordered.

    Attributes:
        shift: bits below the exponent.
        num_bits: of the exponent; 0 for dtypes without one, whose elements all form one class.
        sign_magnitude: whether the top bit is a sign and the rest a magnitude.
    """

    shift: int
    num_bits: int
    sign_magnitude: bool

    @property
    def magnitude(self) -> int:
        """Mask of the exponent and everything below it."""
        return (1 << (self.shift + self.num_bits)) - 1

    @property
    def num_exponents(self) -> int:
        """How many exponents there are."""
        return 1 << self.num_bits

    def of(self, bits: Bits) -> npt.NDArray[np.int64]:
        """Exponents of elements."""
        return ((bits >> bits.dtype.type(self.shift)) & bits.dtype.type(self.num_exponents - 1)).astype(np.int64)

    def classes(self, bits: Bits, boundary: int) -> npt.NDArray[np.uint8]:
        """Classes of elements, `[len(bits)]`."""
        if boundary == NO_CLASSES:
            return np.zeros(bits.size, np.uint8)
        return np.clip(self.of(bits) - boundary, 0, NUM_CLASSES - 1).astype(np.uint8)

    def limits(self, boundary: int) -> list[int]:
        """What the bits without sign must exceed to be of class c or above; entry 0 is not used."""
        starts = ((boundary + number) << self.shift for number in range(1, NUM_CLASSES))
        return [0, *(min(start - 1, self.magnitude) for start in starts)]

    def tables(self, boundary: int) -> Tables:
        """Classes in the forms that compiled kernels read them in."""
        return _tables(self, boundary)


class Tables(NamedTuple):
    """How kernels see the classes of a boundary.

    Attributes:
        classes: class of each exponent, uint8.
        boundary: exponent at which they begin.
        shift, magnitude, sign_magnitude: see `Exponent`.
    """

    classes: npt.NDArray[np.uint8]
    boundary: int
    shift: int
    magnitude: int
    sign_magnitude: bool


@lru_cache(maxsize=256)
def _tables(exponent: Exponent, boundary: int) -> Tables:
    classes = np.clip(np.arange(exponent.num_exponents) - boundary, 0, NUM_CLASSES - 1).astype(np.uint8)
    return Tables(
        classes=classes,
        boundary=boundary,
        shift=exponent.shift,
        magnitude=exponent.magnitude,
        sign_magnitude=exponent.sign_magnitude,
    )


@cache
def exponent_of(dtype: str) -> Exponent:
    """The exponent of a safetensors dtype (rule E8)."""
    shift, num_bits, sign_magnitude = PACKED_EXPONENT.get(dtype, NO_EXPONENT)
    assert shift + num_bits <= 8 * bits_dtype(dtype).itemsize
    return Exponent(shift, num_bits, sign_magnitude)


def sample_step(numel: int) -> int:
    """Every how many elements the histogram looks at one."""
    return max(1, numel >> _SAMPLES_LOG2)


def histograms(exponent: Exponent, region: Bits, old: Bits) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Estimated number of elements of each exponent, and exact number of changed ones.

    Args:
        exponent: of the dtype.
        region: bits of the piece, flat.
        old: bits before of the changed elements.
    """
    step = sample_step(region.size)
    changed = np.bincount(exponent.of(old), minlength=exponent.num_exponents)
    total = np.bincount(exponent.of(region[::step]), minlength=exponent.num_exponents) * step
    return np.maximum(total, changed), changed


@cache
def log2_table() -> npt.NDArray[np.int64]:
    """log2(1 + i / 1024) in 2**-16, rounded."""
    size = 1 << _MANTISSA_BITS
    return np.array([round(65536 * log2(1 + i / size)) for i in range(size)], np.int64)


def fixed_log2(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """log2 of integers of at least 1 in 2**-16, from integer operations only: the same on every machine."""
    power = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1  # exact: all are below 2**53
    mantissa = (values << _MANTISSA_BITS >> power) - (1 << _MANTISSA_BITS)
    logs: npt.NDArray[np.int64] = (power << 16) + log2_table()[mantissa]
    return logs


def choose_boundary(exponent: Exponent, region: Bits, old: Bits) -> int:
    """The boundary of a piece: `pick_boundary` of its `histograms`, compiled where that pays.

    Args:
        exponent: of the dtype.
        region: bits of the piece, flat and contiguous.
        old: bits before of the changed elements.
    """
    kernel = BOUNDARY[region.itemsize].get(region.size)
    if kernel is None or not exponent.num_bits:
        return pick_boundary(*histograms(exponent, region, old))
    return int(
        kernel(
            region,
            np.ascontiguousarray(old),
            sample_step(region.size),
            exponent.shift,
            exponent.magnitude,
            exponent.num_exponents,
            log2_table(),
            _MANTISSA_BITS,
            _LIST_BITS,
            _MAX_CANDIDATES,
        )
    )


def _position_bits(changed: npt.NDArray[np.int64], total: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Information in which `changed` of `total` elements changed, in 2**-16 bits, and what a list costs."""
    rest = total - changed
    logs = fixed_log2(np.maximum(total, 1))
    inner = changed * (logs - fixed_log2(np.maximum(changed, 1))) + rest * (logs - fixed_log2(np.maximum(rest, 1)))
    return np.where((changed > 0) & (rest > 0), inner, 0) + np.where(changed > 0, _LIST_BITS, 0)


def pick_boundary(total: npt.NDArray[np.int64], changed: npt.NDArray[np.int64]) -> int:
    """The boundary that takes the fewest bits, or `NO_CLASSES` where classes do not pay.

    Args:
        total: elements of each exponent.
        changed: changed elements of each exponent, at most `total`.
    """
    used = np.flatnonzero(total)
    if total.size == 1 or not used.size:
        return NO_CLASSES
    last = int(used[-1])
    first = max(int(used[0]), last - _MAX_CANDIDATES + 1)
    sums = [np.concatenate(([0], np.cumsum(counts))) for counts in (changed, total)]
    candidates = np.arange(first, last + 1)
    inner = np.minimum(candidates[:, None] + np.arange(1, NUM_CLASSES), total.size)
    ends = np.concatenate((inner, np.full((candidates.size, 1), total.size)), axis=1)
    of_class = [np.diff(counts[ends], axis=1, prepend=0) for counts in sums]
    cost = _position_bits(*of_class).sum(axis=1)
    best = int(np.argmin(cost))
    alone = _position_bits(changed.sum(keepdims=True), total.sum(keepdims=True))
    return NO_CLASSES if alone[0] <= cost[best] else int(candidates[best])
