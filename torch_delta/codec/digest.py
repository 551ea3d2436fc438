"""The additive digest of arrays: whole tensors, boxes of them, and changes. Defined in `torch_delta.format.digest`.

    D_l = sum over i of K_l[i mod 1024] * B_l[i div 1024] * w_i   mod 2**64,   l = 0, 1

`i` counts words of the *full* tensor in row-major order, so digests of disjoint boxes add up to the tensor's. A word is
an element, except that an element of 8 bytes is two words, low half first.

Every function may be called from any thread and holds the GIL only between chunks. Extra memory is a few MiB at most.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import Bits, Index, blocks, check_bits, flat_chunks
from torch_delta.codec.geometry import Layout
from torch_delta.codec.kernels import DIGEST_CHANGES, DIGEST_DELTA, DIGEST_ROWS
from torch_delta.format.box import Box
from torch_delta.format.digest import MASK64, NUM_COLUMN_KEYS, ZERO, Digest, column_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

_Words = npt.NDArray[np.uint64]

_CHUNK = 1 << 20  # elements copied at once where an input is not contiguous
_DELTA_CHUNK = 1 << 15  # changed elements per pass: differences stay in cache, and no fresh pages are touched
_NUMPY_CHUNK = 1 << 16  # words per pass of the reference


def digest_array(bits: Bits) -> Digest:
    """Digest of a whole tensor.

    Args:
        bits: of any shape and strides.
    """
    check_bits(bits, "bits")
    total = ZERO
    for start, (chunk,) in flat_chunks(bits, max_elements=max(bits.size, 1) if bits.flags.c_contiguous else _CHUNK):
        total += _digest_rows(chunk, 1, chunk.size, start, 0)
    return total


def digest_run(bits: Bits, start: int = 0) -> Digest:
    """Digest of consecutive elements of a tensor.

    Args:
        bits: 1-D.
        start: flat index of the first of them in the full tensor.
    """
    check_bits(bits, "bits")
    if bits.ndim != 1 or start < 0:
        raise ValueError(f"a run is 1-D and starts at 0 or later, got shape {bits.shape} at {start}")
    return _digest_rows(np.ascontiguousarray(bits), 1, bits.size, start, 0)


def digest_box(bits: Bits, box: Box, full_shape: Sequence[int]) -> Digest:
    """Digest of a box of a tensor: what the box contributes to the tensor's digest.

    Args:
        bits: elements of the box, of shape `box.shape`, any strides.
        box: in full-tensor coordinates; may be empty.
        full_shape: of the tensor.

    Raises:
        ValueError: `bits` has another shape, or the box does not fit.
    """
    check_bits(bits, "bits")
    if bits.shape != tuple(box.shape) or not box.fits(full_shape):
        raise ValueError(
            f"bits of shape {bits.shape} for the box {box.offset} {box.shape} of a tensor of shape {tuple(full_shape)}"
        )
    if not bits.size:
        return ZERO
    if not bits.flags.c_contiguous and bits.size > _CHUNK:
        return _digest_in_pieces(bits, box, full_shape)
    flat = np.ascontiguousarray(bits).reshape(-1)
    layout = Layout.of(box, full_shape)
    total, at = ZERO, 0
    for start, num_rows, row_length, stride in layout.rows():
        total += _digest_rows(flat[at : at + layout.row_elements], num_rows, row_length, start, stride)
        at += layout.row_elements
    return total


def digest_delta(index: Index, old: Bits, new: Bits) -> Digest:
    """What overwriting elements adds to a tensor's digest, in O(len(index)).

    Args:
        index: flat index in the full tensor of each element, each at most once, any order; int64 or unsigned.
        old: bits before, `[len(index)]`.
        new: bits after, of the same dtype and length.
    """
    check_bits(old, "old")
    if old.dtype != new.dtype or not index.shape == old.shape == new.shape or index.ndim != 1:
        raise ValueError(
            f"index, old and new must be 1-D of one length, old and new of one dtype; got {index.shape}, {old.shape} "
            f"{old.dtype}, {new.shape} {new.dtype}"
        )
    total = ZERO
    for at in range(0, index.size, _DELTA_CHUNK):
        part = slice(at, at + _DELTA_CHUNK)
        where, before, after = np.ascontiguousarray(index[part], np.int64), old[part], new[part]
        if old.itemsize == 8:
            where = np.stack((2 * where, 2 * where + 1), axis=1).reshape(-1)
            before, after = _as_words(before), _as_words(after)
        delta = np.ascontiguousarray(after.astype(np.uint64) - before.astype(np.uint64))
        kernel = DIGEST_DELTA.get(where.size)
        if kernel is None:
            total += _delta_numpy(where, delta)
        else:
            total += Digest(tuple(map(int, kernel(where, delta, *_column_keys()))))  # type: ignore[arg-type]
    return total


def digest_changes(layout: Layout, index: Index, old: Bits, new: Bits) -> tuple[Digest, Digest]:
    """Digest of some elements of a box before and after a change, in O(len(index)); their difference is the increment.

    Args:
        layout: of the box in its tensor.
        index: box-local positions, strictly increasing; uint32 or int64.
        old: bits before, `[len(index)]`.
        new: bits after, of the same dtype and length.
    """
    [found] = digest_many([layout], np.array([0, index.size], np.int64), index, old, new)
    return found


def digest_many(
    layouts: Sequence[Layout], starts: npt.NDArray[np.int64], index: Index, old: Bits, new: Bits
) -> list[tuple[Digest, Digest]]:
    """`digest_changes` of elements of several boxes in one call, by box.

    Args:
        layouts: of each box in its tensor.
        starts: where the elements of each box begin in the arrays, and where the last ones end, `[len(layouts) + 1]`.
        index: box-local positions, strictly increasing inside a box; uint32 or int64.
        old: bits before, `[len(index)]`.
        new: bits after, of the same dtype and length.
    """
    kernel = DIGEST_CHANGES[old.itemsize].get(index.size) if old.itemsize in DIGEST_CHANGES and index.size else None
    parts = [slice(begin, end) for begin, end in pairwise(starts.tolist())]
    if kernel is None:
        found = []
        for layout, part in zip(layouts, parts, strict=True):
            flat, zeros = layout.flat_index(index[part]), np.zeros_like(old[part])
            found.append((digest_delta(flat, zeros, old[part]), digest_delta(flat, zeros, new[part])))
        return found
    if all(len(layout.steps) == 1 for layout in layouts):
        where, firsts = index, [layout.first for layout in layouts]
    else:
        where, firsts = np.empty(index.size, np.int64), [0] * len(layouts)
        for layout, part in zip(layouts, parts, strict=True):
            where[part] = layout.flat_index(index[part])
    sums = np.zeros((len(layouts), 4), np.uint64)
    arrays = (np.ascontiguousarray(array) for array in (old, new))
    kernel(np.ascontiguousarray(where), np.array(firsts, np.int64), starts, *arrays, *_column_keys(), sums)
    return [(Digest((a, b)), Digest((c, d))) for a, b, c, d in sums.tolist()]


def _digest_in_pieces(bits: Bits, box: Box, full_shape: Sequence[int]) -> Digest:
    """A strided box, of which only a piece at a time is made contiguous."""
    total = ZERO
    for where in blocks(bits.shape, _CHUNK):
        piece = bits[where]
        starts = [part.start for part in where] + [0] * (bits.ndim - len(where))
        offset = tuple(at + start for at, start in zip(box.offset, starts, strict=True))
        total += digest_box(np.ascontiguousarray(piece), Box(offset, piece.shape), full_shape)
    return total


def _digest_rows(flat: Bits, num_rows: int, row_length: int, start: int, stride: int) -> Digest:
    """Rows of `row_length` elements, contiguous in `flat`, whose starts lie `stride` apart in the tensor."""
    words = flat
    if flat.itemsize == 8:
        words, row_length, start, stride = _as_words(flat), 2 * row_length, 2 * start, 2 * stride
    kernel = DIGEST_ROWS[words.itemsize].get(words.size)
    if kernel is None:
        return _rows_numpy(words, num_rows, row_length, start, stride)
    lane0, lane1 = kernel(words, num_rows, row_length, start, stride, *_column_keys())
    return Digest((int(lane0), int(lane1)))


def _as_words(elements: Bits) -> Bits:
    words: Bits = np.ascontiguousarray(elements).view("<u4")
    return words


@cache
def _column_keys() -> tuple[_Words, _Words]:
    lanes = (np.array(column_keys(lane), dtype=np.uint64) for lane in (0, 1))
    first, second = lanes
    return first, second


def _block_keys(lane: int, block: npt.NDArray[Any]) -> _Words:
    """`B_lane[block]`, elementwise."""
    x = block.astype(np.uint64)
    x += np.uint64(((2 + lane) << 48) + 0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x


def _delta_numpy(index: npt.NDArray[np.int64], delta: _Words) -> Digest:
    """The reference of `DIGEST_DELTA`."""
    column, block = index & (NUM_COLUMN_KEYS - 1), index >> 10
    lanes = []
    for lane, keys in enumerate(_column_keys()):
        lanes.append(int((keys[column] * _block_keys(lane, block) * delta).sum(dtype=np.uint64)))
    return Digest((lanes[0], lanes[1]))


def _rows_numpy(words: Bits, num_rows: int, row_length: int, start: int, stride: int) -> Digest:
    """The reference of `DIGEST_ROWS`."""
    if num_rows == 1 or row_length >= NUM_COLUMN_KEYS:
        total = ZERO
        for row in range(num_rows):
            total += _run_numpy(words[row * row_length : (row + 1) * row_length], start + row * stride)
        return total
    # Short rows: one key per word, many rows at a time.
    total = ZERO
    step = max(1, _NUMPY_CHUNK // row_length)
    columns = np.arange(row_length, dtype=np.int64)
    for row in range(0, num_rows, step):
        rows = np.arange(row, min(row + step, num_rows), dtype=np.int64)
        index = (start + rows[:, None] * stride + columns).reshape(-1)
        total += _delta_numpy(index, words[row * row_length : (row + step) * row_length].astype(np.uint64))
    return total


def _run_numpy(words: Bits, start: int) -> Digest:
    lanes = [0, 0]
    at = 0
    while at < words.size:
        block, column = divmod(start + at, NUM_COLUMN_KEYS)
        left = words.size - at
        if column or left < NUM_COLUMN_KEYS:
            num_blocks, width = 1, min(NUM_COLUMN_KEYS - column, left)
        else:
            num_blocks, width = min(left, _NUMPY_CHUNK) // NUM_COLUMN_KEYS, NUM_COLUMN_KEYS
        part = words[at : at + num_blocks * width].reshape(num_blocks, width).astype(np.uint64)
        numbers = np.arange(block, block + num_blocks)
        for lane, keys in enumerate(_column_keys()):
            sums = (part * keys[column : column + width]).sum(axis=1, dtype=np.uint64)
            lanes[lane] += int((sums * _block_keys(lane, numbers)).sum(dtype=np.uint64))
        at += num_blocks * width
    return Digest((lanes[0] & MASK64, lanes[1] & MASK64))
