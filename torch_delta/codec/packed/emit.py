"""Reduced slices to the streams of a frame.

    gaps of a list ──shift k──▶ high: byte (255: the rest as a varint)   low: k bits        or, with `MASK`, a bit each
    steps ─────────▶ sign: a bit                          size - 1: two bits (3: the rest as a varint)

Bits fill bytes from the least significant; lists follow each other without gaps, in the order of the head.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.addresses import address
from torch_delta.codec.bits import as_bytes
from torch_delta.codec.packed import kernels_streams, varints
from torch_delta.codec.packed.classes import NUM_CLASSES
from torch_delta.codec.packed.head import MASK, SliceHead
from torch_delta.codec.packed.reduced import Flat, reduce_gaps
from torch_delta.codec.packed.steps import split
from torch_delta.codec.packed.streams import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.codec.packed.reduced import Reduced

MOST_HIGH = 255
MOST_SIZE = 3
_BITS = {"mask": 1, "sign": 1, "size": 2, "low": 1}
"""Bits per unit in which a stream is counted; of the others, bytes."""
_KERNEL_STREAMS = ("high0", "high", "high_rest", "mask", "sign", "size", "size_rest", "low")
_MOST_HIGH_REST_BYTES = 4  # a varint below 2**23, the elements of a box
_MOST_SIZE_REST_BYTES = {1: 1, 2: 3, 4: 5, 8: 9}
"""By element width: a varint below half of what the element can hold."""

_Bytes = npt.NDArray[np.uint8]


class Emitted(NamedTuple):
    """The streams of a frame, not compressed.

    Attributes:
        streams: by name, all of `NAMES`.
        usage: bits that each slice has in each stream, `[num_slices, len(NAMES)]`.
    """

    streams: Mapping[str, memoryview]
    usage: npt.NDArray[np.int64]


def emit(parts: Sequence[Reduced | Flat]) -> Emitted:
    """Streams of a frame with the given slices, in order."""
    heads = [
        SliceHead.flat(part.new.size, part.numel) if isinstance(part, Flat) else SliceHead.of(part) for part in parts
    ]
    stored_heads = [head.to_bytes() for head in heads]
    compiled = kernels_streams.EMIT[_itemsize(parts[0])].get(sum(sum(head.counts) for head in heads))
    arrays, used = (_emit_numpy if compiled is None else _emit_compiled)(parts, heads)
    streams = {name: as_bytes(array) for name, array in arrays.items()}
    streams["head"] = memoryview(b"".join(stored_heads))
    usage = np.zeros((len(parts), len(NAMES)), np.int64)
    usage[:, 0] = [8 * len(head) for head in stored_heads]
    for column, name in enumerate(_KERNEL_STREAMS):
        usage[:, NAMES.index(name)] = used[:, column] * _BITS.get(name, 8)
    return Emitted(streams, usage)


def _emit_numpy(
    parts: Sequence[Reduced | Flat], heads: Sequence[SliceHead]
) -> tuple[dict[str, _Bytes], npt.NDArray[np.int64]]:
    """The reference: streams as bytes, and units used by slice and stream."""
    found: dict[str, list[_Bytes]] = {name: [np.empty(0, np.uint8)] for name in _KERNEL_STREAMS}
    used = np.zeros((len(parts), len(_KERNEL_STREAMS)), np.int64)
    reduced = [reduce_gaps(part) if isinstance(part, Flat) else part for part in parts]
    for number, (part, head) in enumerate(zip(reduced, heads, strict=True)):
        before = {name: sum(array.size for array in arrays) for name, arrays in found.items()}
        at = 0
        for count, mode, population in head.lists:
            gaps = part.gaps[at : at + count].astype(np.uint64)
            at += count
            if mode == MASK:
                bits = np.zeros(population, np.uint8)
                bits[np.cumsum(gaps + np.uint64(1)) - np.uint64(1)] = 1
                found["mask"].append(bits)
                continue
            high = gaps >> np.uint64(mode)
            found["high" if mode else "high0"].append(np.minimum(high, MOST_HIGH).astype(np.uint8))
            found["high_rest"].append(_varints(high[high >= MOST_HIGH] - np.uint64(MOST_HIGH)))
            shifts = np.arange(mode, dtype=np.uint64)
            found["low"].append((gaps[:, None] >> shifts & np.uint64(1)).astype(np.uint8).reshape(-1))
        negative, excess = split(part.steps)
        found["sign"].append(negative.astype(np.uint8))
        found["size"].append(np.minimum(excess, MOST_SIZE).astype(np.uint8))
        found["size_rest"].append(_varints(excess[excess >= MOST_SIZE].astype(np.uint64) - np.uint64(MOST_SIZE)))
        used[number] = [sum(array.size for array in found[name]) - before[name] for name in _KERNEL_STREAMS]
    joined = {name: np.concatenate(arrays) for name, arrays in found.items()}
    for name in ("mask", "sign", "low"):
        joined[name] = np.packbits(joined[name], bitorder="little")
    joined["size"] = pack_pairs(joined["size"])
    return joined, used


def _varints(values: npt.NDArray[np.uint64]) -> _Bytes:
    return np.frombuffer(varints.encode(values), np.uint8)


def pack_pairs(codes: _Bytes) -> _Bytes:
    """Codes of two bits, four to a byte."""
    padded = np.zeros(-(-codes.size // 4) * 4, np.uint8)
    padded[: codes.size] = codes
    quarters = padded.reshape(-1, 4)
    packed: _Bytes = np.bitwise_or.reduce(quarters << np.array([0, 2, 4, 6], np.uint8), axis=1, dtype=np.uint8)
    return packed


def _emit_compiled(
    parts: Sequence[Reduced | Flat], heads: Sequence[SliceHead]
) -> tuple[dict[str, _Bytes], npt.NDArray[np.int64]]:
    """The same by kernel, into buffers of the frame: one call for all neighbouring slices of one element width."""
    lists = _padded(heads)
    counts, modes, populations = (lists[:, number] for number in range(3))
    masked, shifted = modes == MASK, (modes > 0) & (modes != MASK)
    num_flat, num_shifted = int(counts[modes == 0].sum()), int(counts[shifted].sum())
    of_slices = counts.sum(axis=1)
    total = int(of_slices.sum())
    most_size_rest = np.array([_MOST_SIZE_REST_BYTES[_itemsize(part)] for part in parts])
    sizes = {
        "high0": num_flat,
        "high": num_shifted,
        "high_rest": (num_flat + num_shifted) * _MOST_HIGH_REST_BYTES,  # of which only what is written becomes memory
        "mask": -(-int(populations[masked].sum()) // 8),
        "sign": -(-total // 8),
        "size": -(-total // 4),
        "size_rest": int(of_slices @ most_size_rest),
        "low": -(-int((counts * modes)[shifted].sum()) // 8),
    }
    arrays = {name: (np.zeros if name in _BITS else np.empty)(size, np.uint8) for name, size in sizes.items()}
    cursors = np.zeros((len(parts) + 1, len(_KERNEL_STREAMS)), np.int64)
    at = 0
    for itemsize, same in groupby(parts, _itemsize):
        held = [_arrays(part) for part in same]  # for as long as the kernel reads them
        sources = np.array([(how, *map(address, read)) for how, *read in held], np.int64)
        kernel = kernels_streams.EMIT[itemsize].compile()
        assert kernel is not None
        end = at + len(held)
        kernel(sources, lists[at:end], *arrays.values(), cursors[at : end + 1])
        at = end
    for column, name in enumerate(_KERNEL_STREAMS):
        if name not in _BITS:
            arrays[name] = arrays[name][: cursors[-1, column]]
    return arrays, np.diff(cursors, axis=0)


def _itemsize(part: Reduced | Flat) -> int:
    return (part.new if isinstance(part, Flat) else part.steps).itemsize


def _arrays(part: Reduced | Flat) -> tuple[Any, ...]:
    """How the kernel reads a slice, and from which arrays."""
    if isinstance(part, Flat):
        how = kernels_streams.SIGN_MAGNITUDE if part.sign_magnitude else kernels_streams.UNSIGNED
        return how, *map(np.ascontiguousarray, (part.positions, part.old, part.new))
    gaps, steps = np.ascontiguousarray(part.gaps), np.ascontiguousarray(part.steps)
    return kernels_streams.REDUCED, gaps, steps, steps[:0]


def _padded(heads: Sequence[SliceHead]) -> npt.NDArray[np.int64]:
    """Counts, modes and populations of all slices, `[num_slices, 3, NUM_CLASSES]`; zero for classes a slice lacks."""
    lists = np.zeros((len(heads), 3, NUM_CLASSES), np.int64)
    for number, head in enumerate(heads):
        lists[number, :, : len(head.counts)] = head.counts, head.modes, head.populations
    return lists
