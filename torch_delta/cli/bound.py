"""The fewest bits any code could need for a change, given what the receiver knows of every element: its old exponent.

Per tensor and old exponent, two adaptive code lengths that no fixed choice of parameters beats by much: of which
elements changed (Krichevsky-Trofimov), and of their steps (Dirichlet 1/2 over the signs and sizes up to `LARGEST`;
larger steps pay for a universal code of their size).
"""

from __future__ import annotations

from math import lgamma, log, pi
from typing import TYPE_CHECKING, Final

import numpy as np

from torch_delta.codec.packed.classes import exponent_of
from torch_delta.codec.packed.steps import split, steps

if TYPE_CHECKING:
    from torch_delta.codec.bits import Bits, Index

LARGEST: Final = 4
"""Steps of more units in the last place are escapes."""
_NUM_SYMBOLS: Final = 2 * (LARGEST + 1)


class TensorBound:
    """Counts of one tensor, filled piece by piece.

    Args:
        dtype: safetensors spelling.
    """

    def __init__(self, dtype: str) -> None:
        self._exponent = exponent_of(dtype)
        size = self._exponent.num_exponents
        self._all = np.zeros(size, np.int64)
        self._steps = np.zeros((size, _NUM_SYMBOLS), np.int64)
        self._escape_bits = 0.0

    def add(self, old: Bits, index: Index, new: Bits) -> None:
        """Count a piece.

        Args:
            old: all bits before, flat.
            index: positions in the piece whose bits changed.
            new: bits after, at `index`.
        """
        size = self._all.size
        self._all += np.bincount(self._exponent.of(old), minlength=size)
        before = old[index]
        negative, excess = split(steps(before, new, sign_magnitude=self._exponent.sign_magnitude))
        symbol = 2 * np.minimum(excess, LARGEST).astype(np.int64) + negative.astype(np.int64)
        pair = self._exponent.of(before) * _NUM_SYMBOLS + symbol
        self._steps += np.bincount(pair, minlength=size * _NUM_SYMBOLS).reshape(size, _NUM_SYMBOLS)
        beyond = excess[excess >= LARGEST].astype(np.float64) - (LARGEST - 1)
        self._escape_bits += float((2 * np.log2(beyond) + 1).sum())

    def bits(self) -> float:
        """Of everything counted so far."""
        total = self._escape_bits
        for here, by_symbol in zip(self._all.tolist(), self._steps.tolist(), strict=True):
            if here:
                total += _flags_bits(sum(by_symbol), here) + _symbols_bits(by_symbol)
        return total


def _flags_bits(num_set: int, num: int) -> float:
    """Krichevsky-Trofimov code length of `num` flags of which `num_set` are set."""
    return (log(pi) + lgamma(num + 1) - lgamma(num_set + 0.5) - lgamma(num - num_set + 0.5)) / log(2)


def _symbols_bits(counts: list[int]) -> float:
    """Code length of symbols that occur so often, under a Dirichlet prior of 1/2."""
    total, half = sum(counts), 0.5 * len(counts)
    if not total:
        return 0.0
    gained = sum(lgamma(count + 0.5) - lgamma(0.5) for count in counts)
    return (lgamma(total + half) - lgamma(half) - gained) / log(2)
