"""The head of a frame: per slice its classes, how many elements of each changed, and how their gaps are stored.

    slice := boundary+1 | 0                  0: one class
             (count [mode [population]])...  per class while changed elements are left; count not for the last class,
                                             mode not for a count of 0, population only with mode `MASK`

`mode` is the Rice shift of the gaps of a list, or `MASK`: a bit per element of the class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.packed.classes import NO_CLASSES, NUM_CLASSES
from torch_delta.format.checks import broken
from torch_delta.format.encodings import PACKED_MASK, PACKED_MAX_SHIFT
from torch_delta.format.table import decode_varints, encode_varint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_delta.codec.packed.reduced import Reduced

MASK: Final = PACKED_MASK
MOST_BYTES_PER_SLICE: Final = 2 + NUM_CLASSES * (4 + 1 + 4)
"""Head of a slice of at most 2**23 elements."""
_HIGH_PARTS_LOG2 = 4  # shifts leave high parts of about 16 to 32: fine-grained enough for whole-bit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceHead:
    """What the head says of one slice.

    Attributes:
        boundary: exponent at which the classes begin, or `NO_CLASSES`.
        counts: changed elements by class, `NUM_CLASSES` entries or 1.
        modes: Rice shift or `MASK` by class; 0 for classes without changes.
        populations: elements of the class where the mode is `MASK`, else 0.
    """

    boundary: int
    counts: tuple[int, ...]
    modes: tuple[int, ...]
    populations: tuple[int, ...]

    @property
    def lists(self) -> Iterator[tuple[int, int, int]]:
        """(count, mode, population) of the classes in which something changed."""
        return (entry for entry in zip(self.counts, self.modes, self.populations, strict=True) if entry[0])

    @classmethod
    def of(cls, reduced: Reduced) -> SliceHead:
        """Pick the modes for a slice."""
        num_lists = 1 if reduced.boundary == NO_CLASSES else NUM_CLASSES
        counts = reduced.counts.tolist()[:num_lists]
        populations = reduced.populations.tolist()[:num_lists]
        modes = tuple(_mode(count, population) for count, population in zip(counts, populations, strict=True))
        return cls(
            boundary=reduced.boundary,
            counts=tuple(counts),
            modes=modes,
            populations=tuple(
                population if mode == MASK else 0 for population, mode in zip(populations, modes, strict=True)
            ),
        )

    @classmethod
    def flat(cls, count: int, numel: int) -> SliceHead:
        """The same for one class of `numel` elements."""
        mode = _mode(count, numel)
        populations = (numel if mode == MASK else 0,)
        return cls(boundary=NO_CLASSES, counts=(count,), modes=(mode,), populations=populations)

    def to_bytes(self) -> bytes:
        """As varints."""
        numbers = [self.boundary + 1]
        left = sum(self.counts)
        for number, (count, mode, population) in enumerate(zip(self.counts, self.modes, self.populations, strict=True)):
            if not left:
                break
            if number < len(self.counts) - 1:
                numbers.append(count)
            if count:
                numbers += (mode, population) if mode == MASK else (mode,)
            left -= count
        return b"".join(bytes((n,)) if n < 128 else encode_varint(n) for n in numbers)


def _mode(count: int, population: int) -> int:
    """How to store the gaps of a list: a mask where more than a quarter changed, else high parts near 16 to 32."""
    if not count:
        return 0
    if 4 * count > population:
        return MASK
    return min(max((population // count >> _HIGH_PARTS_LOG2).bit_length() - 1, 0), PACKED_MAX_SHIFT)


class Heads(NamedTuple):
    """What the head says of all slices of a frame.

    Attributes:
        boundaries: exponent at which the classes of each begin, or `NO_CLASSES`, int64 `[num_slices]`.
        lists: per slice the changed elements, the mode and the population of each class, as in `SliceHead` and zero
            where a slice has no such class, int64 `[num_slices, 3, NUM_CLASSES]`.
    """

    boundaries: npt.NDArray[np.int64]
    lists: npt.NDArray[np.int64]


def parse_heads(data: memoryview, counts: Sequence[int], *, key: str) -> Heads:
    """Parse the head of a frame (rule E8).

    Args:
        data: the decoded stream.
        counts: elements set by each slice, from the table.
        key: of the part, for messages.

    Raises:
        FormatError: rule E8 is broken, or P5 by a varint.
    """
    numbers = iter(decode_varints(data, key=key))
    boundaries: list[int] = []
    lists: list[tuple[list[int], list[int], list[int]]] = []
    try:
        for count in counts:
            boundaries.append(next(numbers) - 1)
            lists.append(_parse_lists(numbers, 1 if boundaries[-1] == NO_CLASSES else NUM_CLASSES, count, key))
    except StopIteration:
        raise broken("E8", key, "the head of a packed frame ends inside a slice") from None
    if next(numbers, None) is not None:
        raise broken("E8", key, "the head of a packed frame goes on after its last slice")
    return Heads(np.array(boundaries, np.int64), np.array(lists, np.int64))


def _parse_lists(
    numbers: Iterator[int], num_lists: int, count: int, key: str
) -> tuple[list[int], list[int], list[int]]:
    counts, modes, populations = [0] * NUM_CLASSES, [0] * NUM_CLASSES, [0] * NUM_CLASSES
    left = count
    for number in range(num_lists):
        if not left:
            break
        here = next(numbers) if number < num_lists - 1 else left
        if here > left:
            raise broken("E8", key, f"{here} changed elements in a class, {left} are left of the slice's {count}")
        if not here:
            continue
        mode = next(numbers)
        if mode == MASK:
            populations[number] = next(numbers)
            if populations[number] < here:
                raise broken("E8", key, f"{here} changed elements in a class of {populations[number]}")
        elif mode > PACKED_MAX_SHIFT:
            raise broken("E8", key, f"mode {mode} of a list; expected 0 to {PACKED_MAX_SHIFT} or {MASK}", got=mode)
        counts[number], modes[number] = here, mode
        left -= here
    return counts, modes, populations
