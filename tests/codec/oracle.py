"""What the codec must compute, in plain Python and from the text of docs/format.md only; shares no code with it."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from torch_delta.format.digest import Digest
from torch_delta.format.schema import Schema, TensorSpec

if TYPE_CHECKING:
    from torch_delta.format.box import Box

M = 2**64 - 1
DTYPES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "I8": 1, "BOOL": 1, "I64": 8}


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & M
    return x ^ x >> 31


def key(lane: int, i: int) -> int:
    return (mix((lane << 48) + i % 1024) | 1) * (mix(((2 + lane) << 48) + i // 1024) | 1)


def digest(elements: dict[int, int], width: int) -> Digest:
    """Of elements by their flat index in the full tensor."""
    words = {}
    for i, w in elements.items():
        if width == 8:
            words[2 * i], words[2 * i + 1] = w & 0xFFFFFFFF, w >> 32
        else:
            words[i] = w
    return Digest(tuple(sum(key(lane, i) * w for i, w in words.items()) & M for lane in (0, 1)))


def flat_positions(box: Box, full: tuple[int, ...]) -> list[int]:
    """Flat indices of a box's elements in box-local order, one coordinate tuple at a time."""
    strides = [math.prod(full[dim + 1 :]) for dim in range(len(full))]
    ranges = [range(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True)]
    return [sum(c * s for c, s in zip(where, strides, strict=True)) for where in product(*ranges)]


def schema_of(*specs: tuple[str, tuple[int, ...]]) -> Schema:
    """Tensors t000, t001, ... of the given dtypes and shapes."""
    return Schema(tuple(TensorSpec(f"t{at:03}", dtype, tuple(shape)) for at, (dtype, shape) in enumerate(specs)))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], width: int) -> np.ndarray:
    """Any bit patterns: NaN, infinities and -0.0 included."""
    return rng.integers(0, 256, (*shape, width), dtype=np.uint8).view(f"<u{width}").reshape(shape)


def touch(rng: np.random.Generator, old: np.ndarray, share: float) -> np.ndarray:
    """A copy in which about `share` of the elements have other bits."""
    new = old.copy()
    where = rng.random(old.shape) < share
    flips = rng.integers(1, 256, old.shape).astype(old.dtype)
    new[where] ^= flips[where]
    return new
