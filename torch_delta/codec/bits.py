"""Elements as unsigned integers of their own width, and walking over them in row-major order."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_delta.format.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Elements of a tensor: uint8, uint16, uint32 or uint64, little-endian."""
Index = npt.NDArray[np.integer[Any]]
"""Positions in row-major order; integers of 32 or 64 bits."""

_UNSIGNED: dict[int, np.dtype[Any]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


def bits_dtype(spelling: str) -> np.dtype[Any]:
    """The unsigned integer type for elements of a safetensors dtype such as ``BF16``.

    Raises:
        KeyError: the dtype is not one a stream can have.
    """
    return _UNSIGNED[ITEMSIZE[spelling]]


def index_dtype(numel: int) -> np.dtype[Any]:
    """Type of box-local indices in a box of `numel` elements: uint32 where they fit, else int64."""
    return np.dtype("<u4") if numel < 1 << 32 else np.dtype("<i8")


def check_bits(array: npt.NDArray[Any], name: str) -> None:
    """Refuse anything but unsigned little-endian integers.

    Raises:
        ValueError: another dtype; says which.
    """
    if _UNSIGNED.get(array.dtype.itemsize) != array.dtype:
        raise ValueError(f"{name} must be bits, unsigned integers of the element's width; got dtype {array.dtype}")


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array in row-major order; a view if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def blocks(shape: Sequence[int], max_elements: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array into pieces that follow each other in row-major order.

    Args:
        shape: of the array, at least one dim.
        max_elements: per piece.

    Yields:
        What to subscript the array with; trailing dims that are taken whole are left out.
    """
    inner = prod(shape[1:])
    if inner <= max_elements:
        step = max(1, max_elements // max(1, inner))
        for at in range(0, shape[0], step):
            yield (slice(at, at + step),)
        return
    for at in range(shape[0]):
        for rest in blocks(shape[1:], max_elements):
            yield (slice(at, at + 1), *rest)


def flat_chunks(*arrays: Bits, max_elements: int) -> Iterator[tuple[int, tuple[Bits, ...]]]:
    """Walk over arrays of one shape together, in row-major order.

    Args:
        *arrays: any strides; what is not contiguous is copied chunk by chunk.
        max_elements: per chunk.

    Yields:
        ``(flat start, chunks)``, each chunk 1-D, contiguous and not empty.
    """
    if all(array.flags.c_contiguous for array in arrays):
        flats = [array.reshape(-1) for array in arrays]
        for start in range(0, flats[0].size, max_elements):
            yield start, tuple(flat[start : start + max_elements] for flat in flats)
        return
    at_least_1d = [np.atleast_1d(array) for array in arrays]
    start = 0
    for where in blocks(at_least_1d[0].shape, max_elements):
        chunks = tuple(np.ascontiguousarray(array[where]).reshape(-1) for array in at_least_1d)
        if chunks[0].size:
            yield start, chunks
        start += chunks[0].size


def gather(region: Bits, index: Index) -> Bits:
    """`region.reshape(-1)[index]` in O(len(index)), also where the region is a strided view."""
    places = index.astype(np.intp, copy=False)  # numpy casts other types in small buffers, at half the speed
    if region.flags.c_contiguous:
        return region.reshape(-1)[places]
    where = np.unravel_index(places, region.shape)
    taken: Bits = region[where]
    return taken
