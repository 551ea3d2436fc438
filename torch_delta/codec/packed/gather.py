"""The streams of a frame back to gaps and steps, slice by slice; every size is checked before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.packed import kernels_gather, varints
from torch_delta.codec.packed.emit import MOST_HIGH, MOST_SIZE
from torch_delta.codec.packed.head import MASK, MOST_BYTES_PER_SLICE, SliceHead, parse_heads
from torch_delta.codec.packed.steps import join
from torch_delta.format.checks import broken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_delta.codec.bits import Bits
    from torch_delta.codec.packed.streams import SealedStreams

_MOST_VARINT_BYTES = 9
_Bytes = npt.NDArray[np.uint8]


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


class Gathered(NamedTuple):
    """One slice; see `Reduced`.

    Attributes:
        head: its classes and lists.
        gaps: uint32 `[count]`, each below the elements of the box.
        steps: unsigned `[count]`.
    """

    head: SliceHead
    gaps: npt.NDArray[np.uint32]
    steps: Bits


def gather(streams: SealedStreams, slices: Sequence[Expected], *, key: str) -> Iterator[Gathered]:
    """Decode the streams of a frame.

    Memory is bounded by the elements that the slices set and by the elements of their boxes, whatever the streams
    declare.

    Raises:
        FormatError: one of rules E7 to E9 is broken; also after the last slice.
    """
    head = streams.load("head", len(slices) * MOST_BYTES_PER_SLICE, fewest=1)
    heads = parse_heads(head, [item.num_set for item in slices], key=key)
    reader = _Reader(streams, heads, slices, key)
    for slice_head, item in zip(heads, slices, strict=True):
        yield reader.take(slice_head, item)
    reader.finish()


class _Reader:
    """The streams of a frame, decompressed, and how far each was read."""

    def __init__(
        self, streams: SealedStreams, heads: Sequence[SliceHead], slices: Sequence[Expected], key: str
    ) -> None:
        self._key = key
        total = sum(item.num_set for item in slices)
        num_high = {False: 0, True: 0}
        num_low = num_mask = 0
        for head, item in zip(heads, slices, strict=True):
            if sum(head.populations) > item.numel:
                raise broken("E8", key, f"classes of {sum(head.populations)} elements in a box of {item.numel}")
            for count, mode, population in head.lists:
                if mode == MASK:
                    num_mask += population
                else:
                    num_high[mode > 0] += count
                    num_low += count * mode
        self._bits = {"mask": num_mask, "sign": total, "size": 2 * total, "low": num_low}
        sizes = {"high0": num_high[False], "high": num_high[True]}
        sizes |= {name: -(-bits // 8) for name, bits in self._bits.items()}
        self._arrays = {name: np.frombuffer(streams.load(name, size), np.uint8) for name, size in sizes.items()}
        self._check_padding()
        self._rests = {}
        for name, most in (("high_rest", num_high[False] + num_high[True]), ("size_rest", total)):
            self._rests[name] = varints.decode(streams.load(name, most * _MOST_VARINT_BYTES, fewest=0), key=key)
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

    def take(self, head: SliceHead, item: Expected) -> Gathered:
        """The next slice."""
        gaps, steps = np.empty(item.num_set, np.uint32), np.empty(item.num_set, item.dtype)
        kernel = kernels_gather.GATHER[item.dtype.itemsize].get(item.num_set)
        is_good = (
            self._take_numpy(head, item, gaps, steps) if kernel is None else self._run(kernel, head, gaps, steps, item)
        )
        if not is_good:
            raise broken("E9", self._key, "a gap, a mask or a step of a packed frame is out of range")
        return Gathered(head, gaps, steps)

    def _run(
        self,
        kernel: Callable[..., int],
        head: SliceHead,
        gaps: npt.NDArray[np.uint32],
        steps: Bits,
        item: Expected,
    ) -> bool:
        lists = np.array((head.counts, head.modes, head.populations), np.int64)
        arrays, rests = self._arrays, self._rests
        return not kernel(
            *lists,
            arrays["high0"],
            arrays["high"],
            rests["high_rest"],
            arrays["mask"],
            arrays["sign"],
            arrays["size"],
            rests["size_rest"],
            arrays["low"],
            self._at,
            item.numel,
            gaps,
            steps,
        )

    def _take_numpy(self, head: SliceHead, item: Expected, gaps: npt.NDArray[np.uint32], steps: Bits) -> bool:
        """The reference: fills gaps and steps; False where one is out of range."""
        at = 0
        for count, mode, population in head.lists:
            here = self._mask(count, population) if mode == MASK else self._rice(count, mode)
            if here is None or int(here.max()) >= item.numel:
                return False
            gaps[at : at + count] = here
            at += count
        negative = self._unpacked("sign", 4, item.num_set).astype(item.dtype)
        pairs = self._unpacked("size", 5, 2 * item.num_set).reshape(-1, 2)
        excess = (pairs[:, 0] | pairs[:, 1] << 1).astype(np.uint64)
        large = excess == MOST_SIZE
        excess[large] += self._next_rests("size_rest", 6, int(np.count_nonzero(large)))
        if int(excess.max()) >> (8 * item.dtype.itemsize - 1):
            return False
        steps[:] = join(negative, excess.astype(item.dtype))
        return True

    def _rice(self, count: int, shift: int) -> npt.NDArray[np.uint64] | None:
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
        low: npt.NDArray[np.uint64] = bits @ (np.uint64(1) << np.arange(shift, dtype=np.uint64))
        return high << np.uint64(shift) | low

    def _mask(self, count: int, population: int) -> npt.NDArray[np.uint64] | None:
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

    def _next_rests(self, name: str, column: int, count: int) -> npt.NDArray[np.uint64]:
        begin = int(self._at[column])
        self._at[column] += count
        return self._rests[name][begin : begin + count]

    def finish(self) -> None:
        """Nothing can be left: every size was derived from the heads."""
        assert self._at[2] == self._rests["high_rest"].size
        assert self._at[6] == self._rests["size_rest"].size
