"""Old bits of versions that exist nowhere on disk: the weight files, with pending versions laid over them.

Merging decodes v+1 to v+n in order, and each needs the bits the one before left. A tensor that one of them
touches is copied here once and changed here; the weight files are only read. Copies beyond a bound of memory lie in an
unnamed file beside the checkpoint, which the kernel may write out, so a model of any size can be merged on any host.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from torch_delta.codec.bits import Bits, bits_dtype
from torch_delta.codec.geometry import Layout
from torch_delta.receive.diskio import local_io

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from torch_delta.codec.change import Change
    from torch_delta.format.box import Box
    from torch_delta.receive.weights import Weights

_MEMORY_BYTES = 1 << 30
_PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class Scratch:
    """Copies of the tensors that changed, over the weights that did not; any thread may read and write.

    Two threads may write to boxes that do not overlap, and read from boxes that nobody writes to: what rule P1 promises
    of the slices of one version.

    Args:
        weights: of the checkpoint; never written here.
        folder: on a local disk, for what goes beyond `memory_bytes`.
        memory_bytes: of copies that are kept in memory.
    """

    def __init__(self, weights: Weights, folder: Path, *, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._weights = weights
        self._folder = folder
        self._left_bytes = memory_bytes
        self._copies: dict[int, Bits] = {}
        self._lock = threading.Lock()
        self._copying: dict[int, threading.Lock] = {}
        self._fd: int | None = None
        self._file_bytes = 0
        self.file_bytes = 0

    @property
    def touched(self) -> list[int]:
        """Schema indices of the tensors that were written to, ascending."""
        return sorted(self._copies)

    def flat(self, tensor: int) -> Bits:
        """Current bits of a tensor, `[numel]`; a view."""
        return self._copies.get(tensor, self._weights.flat(tensor))

    def read(self, tensor: int, box: Box) -> Bits:
        """Current bits of a box, of its shape; a view that later writes show in."""
        copy = self._copies.get(tensor)
        if copy is None:
            return self._weights.read(tensor, box)
        where = tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
        return copy.reshape(self._weights.schema.tensors[tensor].shape)[where]

    def write(self, changes: Iterable[Change]) -> None:
        """Set the elements of some changes."""
        for change in changes:
            if not change.count:
                continue
            flat, shape = self._copy(change.tensor), self._weights.schema.tensors[change.tensor].shape
            layout = Layout.of(change.box, shape)
            if change.index is None and len(layout.steps) == 1:
                flat[layout.first : layout.first + change.count] = change.new
            else:
                flat[layout.flat_index(change.positions())] = change.new

    def _copy(self, tensor: int) -> Bits:
        with self._lock:
            known = self._copies.get(tensor)
            guard = self._copying.setdefault(tensor, threading.Lock())
        if known is not None:
            return known
        with guard:  # not the other one: a large tensor takes a while, and other tensors need not wait for it
            known = self._copies.get(tensor)
            if known is None:
                known = self._room(tensor)
                known[:] = self._weights.flat(tensor)
                self._copies[tensor] = known
            return known

    def _room(self, tensor: int) -> Bits:
        spec = self._weights.schema.tensors[tensor]
        with self._lock:
            if spec.nbytes <= self._left_bytes:
                self._left_bytes -= spec.nbytes
                return np.empty(spec.numel, bits_dtype(spec.dtype))
            with local_io(self._folder, "merge versions"):
                if self._fd is None:
                    self._fd, name = tempfile.mkstemp(prefix="merge-", dir=self._folder)
                    Path(name).unlink()
                at, size = self._file_bytes, -(-spec.nbytes // _PAGE_BYTES) * _PAGE_BYTES
                os.posix_fallocate(self._fd, at, size)  # no room: said here, not by a signal in the middle of a write
                self._file_bytes += size
                self.file_bytes = self._file_bytes
                mapping = mmap.mmap(self._fd, size, offset=at)
        return np.frombuffer(mapping, bits_dtype(spec.dtype), spec.numel)

    def close(self) -> None:
        """Forget everything; arrays that were handed out keep their own memory."""
        self._copies.clear()
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
