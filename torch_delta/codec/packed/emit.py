"""Reduced slices to the streams of a frame.

    gaps of a list ──shift k──▶ high: byte (255: the rest as a varint)   low: k bits        or, with `MASK`, a bit each
    steps ─────────▶ sign: a bit                          size - 1: two bits (3: the rest as a varint)

Bits fill bytes from the least significant; lists follow each other without gaps, in the order of the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import as_bytes
from torch_delta.codec.packed import kernels_streams, varints
from torch_delta.codec.packed.head import MASK, SliceHead
from torch_delta.codec.packed.steps import split
from torch_delta.codec.packed.streams import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.codec.packed.reduced import Reduced

MOST_HIGH = 255
MOST_SIZE = 3
_BITS = {"high0": 8, "high": 8, "mask": 1, "sign": 1, "size": 2, "low": 1}
"""Bits per unit in which a compiled kernel counts a stream."""
_KERNEL_STREAMS = ("high0", "high", "high_rest", "mask", "sign", "size", "size_rest", "low")
_RESTS = frozenset({"high_rest", "size_rest"})
_REST_BITS = 12  # of a varint, about; only for measuring

_Bytes = npt.NDArray[np.uint8]
_Rests = npt.NDArray[np.uint64]
_Stream = npt.NDArray[np.unsignedinteger[Any]]
"""Bytes, or the numbers of a stream of varints."""


class Emitted(NamedTuple):
    """The streams of a frame, not compressed.

    Attributes:
        streams: by name, all of `NAMES`.
        usage: bits that each slice has in each stream, `[num_slices, len(NAMES)]`; of varint streams about.
    """

    streams: Mapping[str, memoryview]
    usage: npt.NDArray[np.int64]


def emit(parts: Sequence[Reduced]) -> Emitted:
    """Streams of a frame with the given slices, in order."""
    heads = [SliceHead.of(part) for part in parts]
    stored_heads = [head.to_bytes() for head in heads]
    total = sum(part.count for part in parts)
    compiled = kernels_streams.EMIT[parts[0].steps.itemsize].get(total)
    arrays, used = (_emit_numpy if compiled is None else _emit_compiled)(parts, heads)
    streams = {
        name: memoryview(varints.encode(array.astype(np.uint64, copy=False))) if name in _RESTS else as_bytes(array)
        for name, array in arrays.items()
    }
    streams["head"] = memoryview(b"".join(stored_heads))
    usage = np.zeros((len(parts), len(NAMES)), np.int64)
    usage[:, 0] = [8 * len(head) for head in stored_heads]
    for column, name in enumerate(_KERNEL_STREAMS):
        usage[:, NAMES.index(name)] = used[:, column] * _BITS.get(name, _REST_BITS)
    return Emitted(streams, usage)


def _emit_numpy(
    parts: Sequence[Reduced], heads: Sequence[SliceHead]
) -> tuple[dict[str, _Stream], npt.NDArray[np.int64]]:
    """The reference: streams as arrays, and units used by slice and stream."""
    found: dict[str, list[_Stream]] = {name: [] for name in _KERNEL_STREAMS}
    used = np.zeros((len(parts), len(_KERNEL_STREAMS)), np.int64)
    for number, (part, head) in enumerate(zip(parts, heads, strict=True)):
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
            found["high_rest"].append(high[high >= MOST_HIGH] - np.uint64(MOST_HIGH))
            shifts = np.arange(mode, dtype=np.uint64)
            found["low"].append((gaps[:, None] >> shifts & np.uint64(1)).astype(np.uint8).reshape(-1))
        negative, excess = split(part.steps)
        found["sign"].append(negative.astype(np.uint8))
        found["size"].append(np.minimum(excess, MOST_SIZE).astype(np.uint8))
        found["size_rest"].append((excess[excess >= MOST_SIZE]).astype(np.uint64) - np.uint64(MOST_SIZE))
        used[number] = [sum(array.size for array in found[name]) - before[name] for name in _KERNEL_STREAMS]
    joined: dict[str, _Stream] = {
        name: np.concatenate([np.empty(0, np.uint64 if name in _RESTS else np.uint8), *arrays])
        for name, arrays in found.items()
    }
    for name in ("mask", "sign", "low"):
        joined[name] = np.packbits(joined[name].astype(np.uint8, copy=False), bitorder="little")
    joined["size"] = pack_pairs(joined["size"].astype(np.uint8, copy=False))
    return joined, used


def pack_pairs(codes: _Bytes) -> _Bytes:
    """Codes of two bits, four to a byte."""
    padded = np.zeros(-(-codes.size // 4) * 4, np.uint8)
    padded[: codes.size] = codes
    quarters = padded.reshape(-1, 4)
    packed: _Bytes = np.bitwise_or.reduce(quarters << np.array([0, 2, 4, 6], np.uint8), axis=1, dtype=np.uint8)
    return packed


def _emit_compiled(
    parts: Sequence[Reduced], heads: Sequence[SliceHead]
) -> tuple[dict[str, _Stream], npt.NDArray[np.int64]]:
    """The same by kernel: one call per slice, into buffers of the frame."""
    total = sum(part.count for part in parts)
    num_gaps = {False: 0, True: 0}
    num_low = num_mask = 0
    for head in heads:
        for count, mode, population in head.lists:
            if mode == MASK:
                num_mask += population
            else:
                num_gaps[mode > 0] += count
                num_low += count * mode
    arrays: dict[str, _Stream] = {
        "high0": np.empty(num_gaps[False], np.uint8),
        "high": np.empty(num_gaps[True], np.uint8),
        "high_rest": np.empty(num_gaps[False] + num_gaps[True], np.uint64),
        "mask": np.zeros(-(-num_mask // 8), np.uint8),
        "sign": np.zeros(-(-total // 8), np.uint8),
        "size": np.zeros(-(-total // 4), np.uint8),
        "size_rest": np.empty(total, np.uint64),
        "low": np.zeros(-(-num_low // 8), np.uint8),
    }
    cursors = np.zeros((len(parts) + 1, len(_KERNEL_STREAMS)), np.int64)
    for number, (part, head) in enumerate(zip(parts, heads, strict=True)):
        kernel = kernels_streams.EMIT[part.steps.itemsize].compile()
        assert kernel is not None
        cursors[number + 1] = cursors[number]
        lists = np.array((head.counts, head.modes, head.populations), np.int64)
        kernel(part.gaps, part.steps, *lists, *arrays.values(), cursors[number + 1])
    for column, name in enumerate(_KERNEL_STREAMS):
        if name in _RESTS:
            arrays[name] = arrays[name][: cursors[-1, column]]
    return arrays, np.diff(cursors, axis=0)
