"""Bits of weights, and the few operations capture does on them, on whatever device they live.

Elements are compared as integers of their own width, never as floats: -0.0 differs from 0.0 and a NaN equals itself
(F19). On the host the codec's kernels run on numpy views of the same memory; on a device torch does, without host
synchronisation except where the number of results must be known (`nonzero`).

Legend: `bits` is an integer tensor, 1-D, contiguous; `index` is int32 or int64, 1-D, strictly increasing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from torch_delta.codec.diff import diff, diff_bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.capture.source import Bits

SERVING_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
"""Safetensors spelling -> torch dtype."""

SPELLINGS = {dtype: spelling for spelling, dtype in SERVING_DTYPES.items()}
_CASTS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED: dict[int, Any] = {width: np.dtype(f"u{width}") for width in _INTEGERS}
_SIGNED: dict[int, Any] = {1: np.dtype(np.uint8)} | {width: np.dtype(f"i{width}") for width in (2, 4, 8)}
_KEY_PERIOD = 1 << 14


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether weights of dtype `source` may be served as `target`: equal, or both ordinary floats."""
    return source == target or (source in _CASTS and target in _CASTS)


def to_bits(flat: torch.Tensor, serving: torch.dtype) -> torch.Tensor:
    """Serving-dtype bits of a contiguous 1-D tensor; aliases it when no cast is needed.

    The cast is torch's, round to nearest even, always on contiguous input: torch's strided and contiguous kernels give
    a NaN different bits, and a weight must have one set of bits however it is read.
    """
    if flat.dtype != serving:
        flat = flat.to(serving)
    return flat.view(_INTEGERS[flat.element_size()])


def host(bits: torch.Tensor) -> Bits:
    """Bits (any integer tensor) as an unsigned numpy array; shares memory with a host tensor, copies from a device."""
    here = bits if bits.is_cpu else bits.cpu()
    array: Bits = here.numpy().view(_UNSIGNED[bits.element_size()])
    return array


def as_bits(array: Bits) -> torch.Tensor:
    """The inverse of `host`, in the same memory."""
    return torch.from_numpy(array.view(_SIGNED[array.itemsize]))


def index_dtype(numel: int) -> torch.dtype:
    """Smallest index dtype for a shard of `numel` elements."""
    return torch.int32 if numel <= 2**31 - 1 else torch.int64


def compare(before: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions where bits differ, and the bits of `now` there, in memory of their own."""
    kind = index_dtype(before.numel())
    if before.device.type == "cpu":
        index = _as_index(diff(host(before), host(now)), kind)
    else:
        index = (before != now).nonzero().view(-1).to(kind)
    return index, take(now, index)


def compare_masters(before: torch.Tensor, masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same for fp32 weights served in bf16, without the cast in between; None where there is no such pass.

    Args:
        before: bf16 bits [n].
        masters: fp32 weights [n].
    """
    nan = nan_bits()
    if before.device.type != "cpu" or masters.device.type != "cpu" or nan is None:
        return None
    index, new = diff_bf16(host(masters.view(torch.int32)), host(before), nan_bits=nan)
    return _as_index(index, index_dtype(before.numel())), torch.from_numpy(new.view(np.int16))


def take(bits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`bits[index]` in memory of its own."""
    if bits.device.type == "cpu":
        return torch.from_numpy(bits.numpy()[_places(index)])
    return bits[index.long()]


def put(bits: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """`bits[index] = values` in place."""
    if bits.device.type == "cpu":
        bits.numpy()[_places(index)] = values.numpy()
    else:
        bits[index.long()] = values


def _places(index: torch.Tensor) -> Any:
    """A host index as numpy indexes fastest; other types it casts in small buffers, at half the speed."""
    return index.numpy().astype(np.intp, copy=False)


def merge_first_wins(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Union of (index, old bits) sets, each ascending; where several have an index, the earliest one's value stays."""
    filled = [part for part in parts if part[0].numel()] or [parts[0]]
    if len(filled) == 1:
        return filled[0]
    index, old = (torch.cat(column) for column in zip(*filled, strict=True))
    if index.device.type == "cpu":
        positions = index.numpy()
        order = np.argsort(positions, kind="stable")  # sorted runs: numpy merges them
        ordered = positions[order]
        keep = np.ones(len(ordered), dtype=bool)
        np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
        return torch.from_numpy(ordered[keep]), torch.from_numpy(old.numpy()[order[keep]])
    ordered_index, permutation = torch.sort(index, stable=True)
    fresh = torch.ones_like(ordered_index, dtype=torch.bool)
    torch.ne(ordered_index[1:], ordered_index[:-1], out=fresh[1:])
    return ordered_index[fresh], old[permutation[fresh]]


def drop_equal(
    index: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the entries whose bits differ: what went back to its old value has not changed."""
    keep = old != new
    if old.device.type == "cpu" and bool(keep.all()):
        return index, old, new
    return index[keep], old[keep], new[keep]


def read_flags(flags: Sequence[torch.Tensor | None]) -> list[bool]:
    """Scalar flags on the host, with one synchronisation per device; None reads as False."""
    values = [False] * len(flags)
    places: dict[torch.device, list[int]] = {}
    for number, flag in enumerate(flags):
        if flag is not None:
            places.setdefault(flag.device, []).append(number)
    for numbers in places.values():
        stacked = torch.stack([flag for flag in (flags[number] for number in numbers) if flag is not None])
        for number, value in zip(numbers, stacked.tolist(), strict=True):
            values[number] = bool(value)
    return values


def fingerprint(bits: torch.Tensor) -> torch.Tensor:
    """Position-aware hash of a shard, for noticing changes only; int64 [2] on the shard's device, no host sync.

    Not the published digest: that one adds up over shards; this one only has to be fast. On the host xxh3-128, on a
    device two sums under odd keys per position: of 8-byte words, and of their upper halves, because a change of two
    top bits can cancel in the first.
    """
    if bits.device.type != "cpu":
        return _fingerprint_by_words(bits)
    digest = xxhash.xxh3_128_digest(bits.numpy().data if bits.numel() else b"")
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


def _fingerprint_by_words(bits: torch.Tensor) -> torch.Tensor:
    as_bytes = bits.view(torch.uint8)
    if as_bytes.numel() % 8 or as_bytes.storage_offset() % 8:
        as_bytes = torch.nn.functional.pad(as_bytes, (0, -as_bytes.numel() % 8))
    words = as_bytes.view(torch.int64)
    columns = _keys(_KEY_PERIOD, 1, words.device)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    chunk = _KEY_PERIOD * 1024
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        row = start // _KEY_PERIOD
        whole = part.numel() // _KEY_PERIOD * _KEY_PERIOD
        for block in (part[:whole].view(-1, _KEY_PERIOD), part[whole:].view(1, -1)):
            if block.numel():
                rows = _keys(row + block.shape[0], 2, words.device)[row:]
                keys = columns[: block.shape[1]]
                total[0] += ((block * keys).sum(1) * rows).sum()
                total[1] += (((block >> 32) * keys).sum(1) * rows).sum()
                row += block.shape[0]
    return total


def _keys(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random int64 keys, the same for every call: a prefix of one sequence per salt and device."""
    kept = _KEYS.get((salt, device))
    if kept is None or kept.numel() < count:
        size = max(count, _KEY_PERIOD, 2 * kept.numel() if kept is not None else 0)
        rng = np.random.Generator(np.random.PCG64(salt))
        kept = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, size, dtype=np.int64) | 1).to(device)
        _KEYS[salt, device] = kept
    return kept[:count]


_KEYS: dict[tuple[int, torch.device], torch.Tensor] = {}


def _as_index(positions: Any, kind: torch.dtype) -> torch.Tensor:
    """A codec index (unsigned up to 2^32 elements) as a torch index."""
    return torch.from_numpy(positions.view(np.int32) if kind == torch.int32 else positions.astype(np.int64))


@cache
def nan_bits(device_type: str = "cpu") -> int | None:
    """What torch's cast makes of a NaN on this kind of device, or None if that depends on the NaN."""
    masters = torch.tensor([0x7F800001, 0x7FC00000, -1, -0x400000] * 16, dtype=torch.int32, device=device_type)
    kinds = set(host(to_bits(masters.view(torch.float32), torch.bfloat16)).tolist())
    return kinds.pop() if len(kinds) == 1 else None
