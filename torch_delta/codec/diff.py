"""Which elements differ: bits are compared, never values (F19).

Chunks of `_CHUNK` elements stay in the second cache level between the comparison and the scan of its result. Every
function may be called from any thread; extra memory is a few MiB and the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import Bits, Index, check_bits, flat_chunks, index_dtype
from torch_delta.codec.kernels import CHANGED, ROUND_BF16

_CHUNK = 1 << 18
_FLAGS_PER_WORD = 8
_Positions = npt.NDArray[np.signedinteger[Any]]


def diff(old: Bits, new: Bits) -> Index:
    """Positions of the elements whose bits differ.

    Args:
        old: bits before, any shape and strides.
        new: bits after, of the same shape and dtype.

    Returns:
        Row-major positions, strictly increasing; uint32, or int64 from 2**32 elements on.

    Raises:
        ValueError: shapes or dtypes differ, or the arrays are not bits.
    """
    check_bits(old, "old")
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"old is {old.dtype} {old.shape}, new is {new.dtype} {new.shape}; both must be the same")
    kind = index_dtype(old.size)
    scratch = _scratch(old.size)
    found = [
        _shifted(_changed(a, b, scratch), start, kind) for start, (a, b) in flat_chunks(old, new, max_elements=_CHUNK)
    ]
    return np.concatenate(found) if found else np.empty(0, kind)


def nonzero(bits: Bits) -> Index:
    """Positions of the elements that are not zero; `bits` is 1-D and contiguous. Otherwise as `diff`."""
    kind = index_dtype(bits.size)
    zeros = np.zeros(min(bits.size, _CHUNK), bits.dtype)
    scratch = _scratch(bits.size)
    found = [
        _shifted(_changed(zeros[: chunk.size], chunk, scratch), start, kind)
        for start, (chunk,) in flat_chunks(bits, max_elements=_CHUNK)
    ]
    return np.concatenate(found) if found else np.empty(0, kind)


def diff_bf16(master: Bits, old: Bits, *, nan_bits: int) -> tuple[Index, Bits]:
    """Round fp32 masters to bf16 and compare with bf16 bits, in one pass and without the rounded array.

    Args:
        master: bits of fp32 weights, uint32, any shape and strides.
        old: bits of bf16 weights, uint16, of the same shape.
        nan_bits: the bf16 bits every NaN becomes. The trainer's own cast decides: torch gives 0x7FC0 or 0xFFFF,
            depending on machine and strides.

    Returns:
        Positions as `diff` gives them, and the new bf16 bits there; rounding is to nearest even.
    """
    if master.shape != old.shape or master.dtype != np.uint32 or old.dtype != np.uint16:
        raise ValueError(
            f"masters are uint32 and old bits uint16 of one shape; got {master.dtype} {master.shape}, {old.dtype} "
            f"{old.shape}"
        )
    kind = index_dtype(old.size)
    index: list[Index] = [np.empty(0, kind)]
    values: list[Bits] = [np.empty(0, np.uint16)]
    scratch = _scratch(old.size)
    rounded = np.empty(min(old.size, _CHUNK), np.uint16)
    for start, (wide, narrow) in flat_chunks(master, old, max_elements=_CHUNK):
        new = rounded[: wide.size]
        kernel = ROUND_BF16.get(wide.size)
        if kernel is None:
            _round_bf16_numpy(wide, nan_bits, new)
        else:
            kernel(wide, nan_bits, new)
        here = _changed(narrow, new, scratch)
        index.append(_shifted(here, start, kind))
        values.append(new[here])
    return np.concatenate(index), np.concatenate(values)


def _shifted(positions: _Positions, start: int, kind: np.dtype[Any]) -> Index:
    moved = positions.astype(kind)
    moved += kind.type(start)
    return moved


def _scratch(size: int) -> npt.NDArray[np.int32]:
    """What `_changed` works in, allocated once per call: fresh pages for every chunk would cost more than the scan."""
    return np.empty(min(size, _CHUNK), np.int32)


def _changed(old: Bits, new: Bits, scratch: npt.NDArray[np.int32]) -> _Positions:
    """Positions that differ in two 1-D contiguous chunks; may be a view of `scratch`."""
    kernel = CHANGED[old.itemsize].get(old.size)
    if kernel is None:
        return _changed_numpy(old, new)
    found: _Positions = scratch[: kernel(old, new, scratch)]
    return found


def _changed_numpy(old: Bits, new: Bits) -> _Positions:
    """The reference: compare into flags, scan those as words, refine the words that are not zero."""
    flags = np.zeros(-(-old.size // _FLAGS_PER_WORD) * _FLAGS_PER_WORD, bool)
    np.not_equal(old, new, out=flags[: old.size])
    hit = np.flatnonzero(flags.view(np.uint64))
    if 4 * hit.size > flags.size // _FLAGS_PER_WORD:  # dense: refining would visit most flags anyway
        return np.flatnonzero(flags)
    rows, columns = np.nonzero(flags.reshape(-1, _FLAGS_PER_WORD)[hit])
    return hit[rows] * _FLAGS_PER_WORD + columns


def _round_bf16_numpy(master: Bits, nan_bits: int, out: Bits) -> None:
    """The reference of `ROUND_BF16`."""
    rounded = (master + np.uint32(0x7FFF) + ((master >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded[(master & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)] = nan_bits
    out[:] = rounded
