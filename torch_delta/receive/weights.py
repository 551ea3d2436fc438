"""The bits of a working copy, tensor by tensor: gather, overwrite, digest.

Dimension legend: a *flat* array is `[numel]`, unsigned, of the element's own width, in row-major order of the full
tensor; a *box* array has the shape of its box. Weight files are memory-mapped, which is safe for a local working copy
only: on network file systems a mapping can fail or kill the process (F82), so bases are read, never mapped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Self

import numpy as np

from torch_delta.codec.addresses import address
from torch_delta.codec.bits import Bits, Index, bits_dtype
from torch_delta.codec.digest import digest_array
from torch_delta.codec.geometry import Layout
from torch_delta.codec.kernels import OVERWRITE
from torch_delta.errors import FormatError
from torch_delta.receive.diskio import local_io, sync_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.receive.folder import SafetensorsFolder, TensorLocation


class Weights:
    """Mapped views of every tensor of a schema in a folder; the owner holds the right lock.

    Args:
        folder: the working copy's headers.
        schema: of the stream; must fit the folder (see `SafetensorsFolder.differences`).
        writable: map for writing too.

    Raises:
        FormatError: a file was cut off after its header was read.
        StoreUnavailable: a file could not be opened or mapped.
    """

    def __init__(self, folder: SafetensorsFolder, schema: Schema, *, writable: bool) -> None:
        self.folder = folder
        self.schema = schema
        self._maps: dict[str, mmap.mmap] = {}
        self._stats: dict[str, os.stat_result] = {}
        self._flats: dict[int, list[Bits]] = {}
        try:
            for file in folder.files:
                self._maps[file] = self._map(file, writable=writable)
            self._bind(schema)
        except BaseException:
            self.close()
            raise

    def _map(self, file: str, *, writable: bool) -> mmap.mmap:
        path = self.folder.path / file
        with local_io(path, "map the weights"):
            # The descriptor is closed whatever happens; the mapping holds one of its own (F93).
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                self._stats[file] = os.fstat(fd)
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                return mmap.mmap(fd, 0, access=access)
            finally:
                os.close(fd)

    def _bind(self, schema: Schema) -> None:
        for index in schema.data_indices:
            self._flats[index] = [self._view(self.folder.tensors[schema.tensors[index].name])]
        for spec in schema.tensors:
            location = self.folder.tensors.get(spec.name)
            if spec.alias_of is not None and location is not None:
                # A file may hold a tied weight twice; both copies get every write and are checked.
                self._flats[schema.index(spec.alias_of)].append(self._view(location))

    def _view(self, location: TensorLocation) -> Bits:
        dtype = bits_dtype(location.dtype)
        if location.size_bytes == 0:
            return np.empty(0, dtype)
        buffer = self._maps[location.file]
        if location.offset_bytes + location.size_bytes > len(buffer):
            raise FormatError(f"{self.folder.path / location.file}: cut off while it was opened", key=location.file)
        return np.frombuffer(buffer, dtype, location.size_bytes // dtype.itemsize, location.offset_bytes)

    @property
    def size_bytes(self) -> int:
        """Of all tensors, ties counted once."""
        return sum(flats[0].nbytes for flats in self._flats.values())

    def is_current(self) -> bool:
        """Whether the mapped files are still the ones in the folder (an anchor replaces them)."""
        try:
            return all(os.path.samestat(stat, (self.folder.path / file).stat()) for file, stat in self._stats.items())
        except FileNotFoundError:
            return False

    def flat(self, tensor: int) -> Bits:
        """The live bits of tensor `tensor` (schema index, not an alias), `[numel]`; valid until `close`."""
        return self._flats[tensor][0]

    def read(self, tensor: int, box: Box) -> Bits:
        """A view of the live bits inside `box`, of the box's shape; not a copy, valid until the next write."""
        spec = self.schema.tensors[tensor]
        return self.flat(tensor).reshape(spec.shape)[_slices(box)]

    def overwrite(self, tensor: int, box: Box, index: Index | None, value: Bits) -> None:
        """Set elements to absolute bits; doing it again changes nothing.

        Args:
            tensor: schema index, not an alias.
            box: in full-tensor coordinates.
            index: row-major positions inside the box, strictly increasing, or None for the whole box.
            value: unsigned bits, `[len(index)]` or `[box.numel]`.
        """
        spec = self.schema.tensors[tensor]
        for flat in self._flats[tensor]:
            if flat.size == 0 or value.size == 0:
                continue
            if index is None:
                flat.reshape(spec.shape)[_slices(box)] = value.reshape(box.shape)
                continue
            # Always as int64: numpy casts other types in small buffers, at half the speed.
            flat[Layout.of(box, spec.shape).flat_index(index)] = value

    def overwrite_all(self, slices: Sequence[tuple[int, Box, Index | None, Bits]]) -> None:
        """`overwrite` of several slices, compiled where that pays; releases the GIL then.

        Args:
            slices: arguments of `overwrite` for each.
        """
        rows: dict[int, list[tuple[int, ...]]] = {}
        scattered: dict[int, list[tuple[int, Box, Index | None, Bits]]] = {}
        for item in slices:
            tensor, box, index, value = item
            layout = Layout.of(box, self.schema.tensors[tensor].shape) if value.size else None
            if layout is None or len(layout.steps) > 1 or not _is_compact(self.flat(tensor), index, value):
                self.overwrite(*item)
                continue
            assert index is not None
            scattered.setdefault(value.itemsize, []).append(item)
            rows.setdefault(value.itemsize, []).extend(
                (address(flat), flat.size, layout.first, address(index), address(value), index.size)
                for flat in self._flats[tensor]
            )
        for width, of_width in rows.items():
            kernel = OVERWRITE[width].get(sum(row[-1] for row in of_width))
            if kernel is None or kernel(np.array(of_width, np.int64)) >= 0:
                for item in scattered[width]:  # the reference; an index outside its tensor raises here
                    self.overwrite(*item)

    def digests(self, tensors: Iterable[int]) -> list[Digest]:
        """Digests of whole tensors from the bytes at rest; a full pass over them.

        Raises:
            FormatError: two copies of a tied tensor differ.
        """
        return [self._digest(tensor) for tensor in tensors]

    def _digest(self, tensor: int) -> Digest:
        first, *copies = self._flats[tensor]
        digest = digest_array(np.require(first, requirements="A"))
        for copy in copies:
            if not np.array_equal(first, copy):
                name = self.schema.tensors[tensor].name
                raise FormatError(
                    f"{self.folder.path}: {name!r} and a tensor tied to it differ",
                    tensor=name,
                    key=str(self.folder.path),
                )
        return digest

    def sync(self) -> None:
        """Wait until every write so far would survive a power cut."""
        for file in self._maps:
            path = self.folder.path / file
            with local_io(path, "sync the weights"):
                sync_file(path)

    def close(self) -> None:
        """Drop the mappings; arrays handed out keep theirs alive until they go."""
        self._flats.clear()
        maps, self._maps = self._maps, {}
        for mapping in maps.values():
            with contextlib.suppress(BufferError):  # a caller still holds a view; the mapping goes when the view does
                mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_compact(flat: Bits, index: Index | None, value: Bits) -> bool:
    """Whether a kernel may read these arrays by their addresses."""
    return (
        index is not None
        and index.dtype == np.uint32
        and index.shape == value.shape == (value.size,)
        and value.dtype == flat.dtype
        and flat.flags.writeable
        and index.flags.c_contiguous
        and value.flags.c_contiguous
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
