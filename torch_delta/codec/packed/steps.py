"""Values as steps: how many representable values lie between the old and the new bits of an element.

Float bits are sign and magnitude, so their order as integers runs backwards below zero. Flipping the magnitude of
negative ones gives integers in the order of the values, -0.0 just below 0.0. A step is the difference of two of them
modulo 2**width, so that every pair of bit patterns has one, NaN and infinities too.
Most steps of training are +1 or -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch_delta.codec.bits import Bits


def ordered(bits: Bits, *, sign_magnitude: bool) -> Bits:
    """Bits as two's complement integers in the order of the values; its own inverse."""
    if not sign_magnitude:
        return bits
    kind = bits.dtype.type
    top = kind(8 * bits.itemsize - 1)
    flips: Bits = (bits >> top) * kind((1 << int(top)) - 1)
    return bits ^ flips


def steps(old: Bits, new: Bits, *, sign_magnitude: bool) -> Bits:
    """Step from each old to each new element, modulo 2**width."""
    difference: Bits = ordered(new, sign_magnitude=sign_magnitude) - ordered(old, sign_magnitude=sign_magnitude)
    return difference


def stepped(old: Bits, step: Bits, *, sign_magnitude: bool) -> Bits:
    """The new elements: inverse of `steps`."""
    return ordered(ordered(old, sign_magnitude=sign_magnitude) + step, sign_magnitude=sign_magnitude)


def split(step: Bits) -> tuple[Bits, Bits]:
    """Sign (0 or 1) and magnitude minus one of steps that are not zero."""
    kind = step.dtype.type
    negative: Bits = step >> kind(8 * step.itemsize - 1)
    size: Bits = np.where(negative != 0, kind(0) - step, step)
    return negative, size - kind(1)


def join(negative: Bits, excess: Bits) -> Bits:
    """Steps from sign and magnitude minus one."""
    kind = excess.dtype.type
    size: Bits = excess + kind(1)
    return np.where(negative != 0, kind(0) - size, size)
