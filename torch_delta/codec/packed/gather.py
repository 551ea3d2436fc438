"""The streams of a frame back to gaps and steps, all slices at once; every size is checked before it is used."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.packed import kernels_gather, varints
from torch_delta.codec.packed.emit import MOST_HIGH, MOST_SIZE
from torch_delta.codec.packed.head import MASK, MOST_BYTES_PER_SLICE, Heads, parse_heads
from torch_delta.codec.packed.steps import join
from torch_delta.format.checks import broken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.codec.bits import Bits
    from torch_delta.codec.packed.streams import SealedStreams

_MOST_VARINT_BYTES = 9
_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]


class Expected(NamedTuple):
    """What the table of the part says of a slice.

    Attributes:
        num_set: elements it sets.
        numel: elements of its box.
        dtype: unsigned type of its elements.
    """

    num_set: int
    numel: int
    dtype: np.dtype[np.unsignedinteger]


class Run(NamedTuple):
    """Slices of a frame that follow each other and have elements of one width.

    Attributes:
        first: number of the first of them in the frame.
        heads: their classes and lists.
        starts: where the elements of each begin, and where the last ones end, int64 `[num_slices + 1]`.
        gaps: uint32 `[count]`, each below the elements of the box; by slice, and list after list inside a slice.
        steps: unsigned `[count]`.
    """

    first: int
    heads: Heads
    starts: _Ints
    gaps: npt.NDArray[np.uint32]
    steps: Bits

    @property
    def num_slices(self) -> int:
        """How many slices it has."""
        return self.starts.size - 1


def gather(streams: SealedStreams, slices: Sequence[Expected], *, key: str) -> list[Run]:
    """Decode the streams of a frame.

    Memory is bounded by the elements that the slices set and by the elements of their boxes, whatever the streams
    declare.

    Raises:
        FormatError: one of rules E7 to E9 is broken.
    """
    head = streams.load("head", len(slices) * MOST_BYTES_PER_SLICE, fewest=1)
    heads = parse_heads(head, [item.num_set for item in slices], key=key)
    reader = _Reader(streams, heads, slices, key)
    runs = []
    at = 0
    for dtype, same in groupby(slices, lambda item: item.dtype):
        items = list(same)
        runs.append(reader.take(at, items, dtype))
        at += len(items)
    reader.finish()
    return runs


class _Reader:
    """The streams of a frame, decompressed, and how far each was read."""

    def __init__(self, streams: SealedStreams, heads: Heads, slices: Sequence[Expected], key: str) -> None:
        self._key = key
        self._heads = heads
        total = sum(item.num_set for item in slices)
        counts, modes, populations = (heads.lists[:, number] for number in range(3))
        self._check_populations(populations, slices)
        shifted = (modes > 0) & (modes != MASK)
        num_flat, num_shifted = int(counts[modes == 0].sum()), int(counts[shifted].sum())
        num_low = int((counts * modes)[shifted].sum())
        self._bits = {"mask": int(populations.sum()), "sign": total, "size": 2 * total, "low": num_low}
        sizes = {"high0": num_flat, "high": num_shifted}
        sizes |= {name: -(-bits // 8) for name, bits in self._bits.items()}
        self._arrays = {name: np.frombuffer(streams.load(name, size), np.uint8) for name, size in sizes.items()}
        self._check_padding()
        self._rests = {}
        for name, most in (("high_rest", num_flat + num_shifted), ("size_rest", total)):
            self._rests[name] = _numbers(streams.load(name, most * _MOST_VARINT_BYTES, fewest=0), key)
        # Counted here, so that no loop below can run out of them.
        for name, got in (("high_rest", self._num_escapes("high0", "high")), ("size_rest", self._num_large())):
            if self._rests[name].size != got:
                raise broken(
                    "E9",
                    key,
                    f"stream {name!r} holds {self._rests[name].size} numbers, {got} are needed",
                    expected=got,
                    got=self._rests[name].size,
                )
        self._at = np.zeros(8, np.int64)

    def _check_populations(self, populations: _Ints, slices: Sequence[Expected]) -> None:
        """Rule E8: classes are parts of a box, so that masks take no more bits than it has elements."""
        for of_classes, item in zip(populations.tolist(), slices, strict=True):
            if sum(of_classes) > item.numel:
                raise broken("E8", self._key, f"classes of {sum(of_classes)} elements in a box of {item.numel}")

    def _num_escapes(self, *names: str) -> int:
        return sum(int(np.count_nonzero(self._arrays[name] == MOST_HIGH)) for name in names)

    def _num_large(self) -> int:
        size = self._arrays["size"]
        return sum(int(np.count_nonzero((size & (MOST_SIZE << shift)) == MOST_SIZE << shift)) for shift in (0, 2, 4, 6))

    def _check_padding(self) -> None:
        """Rule E9: what no element uses is zero."""
        for name, bits in self._bits.items():
            if bits % 8 and int(self._arrays[name][-1]) >> bits % 8:
                raise broken("E9", self._key, f"bits behind the last one of stream {name!r} are not zero")

    def take(self, first: int, items: Sequence[Expected], dtype: np.dtype[np.unsignedinteger]) -> Run:
        """The next slices; they have elements of one type."""
        place = slice(first, first + len(items))
        heads = Heads(self._heads.boundaries[place], self._heads.lists[place])
        starts = np.cumsum([0, *(item.num_set for item in items)], dtype=np.int64)
        count = int(starts[-1])
        run = Run(first, heads, starts, np.empty(count, np.uint32), np.empty(count, dtype))
        numels = np.array([item.numel for item in items], np.int64)
        kernel = kernels_gather.GATHER[dtype.itemsize].get(count)
        if kernel is None:
            is_good = self._take_numpy(run, numels)
        else:
            arrays, rests = self._arrays, self._rests
            is_good = not kernel(
                heads.lists,
                arrays["high0"],
                arrays["high"],
                rests["high_rest"],
                arrays["mask"],
                arrays["sign"],
                arrays["size"],
                rests["size_rest"],
                arrays["low"],
                self._at,
                numels,
                starts,
                run.gaps,
                run.steps,
            )
        if not is_good:
            raise broken("E9", self._key, "a gap, a mask or a step of a packed frame is out of range")
        return run

    def _take_numpy(self, run: Run, numels: _Ints) -> bool:
        """The reference: fills gaps and steps; False where one is out of range."""
        starts = run.starts.tolist()
        return all(
            self._take_slice(lists, numel, run.gaps[begin:end], run.steps[begin:end])
            for lists, numel, begin, end in zip(run.heads.lists, numels.tolist(), starts, starts[1:], strict=False)
        )

    def _take_slice(self, lists: _Ints, numel: int, gaps: npt.NDArray[np.uint32], steps: Bits) -> bool:
        at = 0
        for count, mode, population in lists.T.tolist():
            if not count:
                continue
            here = self._mask(count, population) if mode == MASK else self._rice(count, mode)
            if here is None or int(here.max()) >= numel:
                return False
            gaps[at : at + count] = here
            at += count
        negative = self._unpacked("sign", 4, steps.size).astype(steps.dtype)
        pairs = self._unpacked("size", 5, 2 * steps.size).reshape(-1, 2)
        excess = (pairs[:, 0] | pairs[:, 1] << 1).astype(np.uint64)
        large = excess == MOST_SIZE
        excess[large] += self._next_rests("size_rest", 6, int(np.count_nonzero(large)))
        if int(excess.max()) >> (8 * steps.itemsize - 1):
            return False
        steps[:] = join(negative, excess.astype(steps.dtype))
        return True

    def _rice(self, count: int, shift: int) -> _Numbers | None:
        name, column = ("high", 1) if shift else ("high0", 0)
        begin = int(self._at[column])
        self._at[column] += count
        high = self._arrays[name][begin : begin + count].astype(np.uint64)
        large = high == MOST_HIGH
        rests = self._next_rests("high_rest", 2, int(np.count_nonzero(large)))
        if rests.size and int(rests.max()) >> 32:
            return None
        high[large] += rests
        bits = self._unpacked("low", 7, count * shift).reshape(count, shift).astype(np.uint64)
        low: _Numbers = bits @ (np.uint64(1) << np.arange(shift, dtype=np.uint64))
        return high << np.uint64(shift) | low

    def _mask(self, count: int, population: int) -> _Numbers | None:
        ranks = np.flatnonzero(self._unpacked("mask", 3, population))
        if ranks.size != count:
            return None
        return (np.diff(ranks, prepend=-1) - 1).astype(np.uint64)

    def _unpacked(self, name: str, column: int, count: int) -> _Bytes:
        """The next bits of a stream, one to a byte."""
        begin = int(self._at[column])
        self._at[column] += count
        if name == "size":  # counted in pairs by the kernels
            self._at[column] -= count // 2
            begin *= 2
        first = begin // 8
        stored = self._arrays[name][first : -(-(begin + count) // 8)]
        return np.unpackbits(stored, count=begin % 8 + count, bitorder="little")[begin % 8 :]

    def _next_rests(self, name: str, column: int, count: int) -> _Numbers:
        begin = int(self._at[column])
        self._at[column] += count
        return self._rests[name][begin : begin + count]

    def finish(self) -> None:
        """Nothing can be left: every size was derived from the heads."""
        assert self._at[2] == self._rests["high_rest"].size
        assert self._at[6] == self._rests["size_rest"].size


def _numbers(data: memoryview, key: str) -> _Numbers:
    """The numbers of a stream of varints; see `varints.decode`."""
    kernel = kernels_gather.VARINTS.get(len(data))
    if kernel is not None:
        stored, values = np.frombuffer(data, np.uint8), np.empty(len(data), np.uint64)
        count = kernel(stored, values)
        if count >= 0:
            return values[:count]
    return varints.decode(data, key=key)  # which says what is wrong, if something is
