"""The bits of one rank's boxes at one version, held still while training goes on: what an anchor is made of."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torch_delta.capture.source import Region
from torch_delta.errors import StoreUnavailable
from torch_delta.format.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_delta.capture.source import Bits, ChangeSource, OwnedBox
    from torch_delta.format.box import Box
    from torch_delta.format.schema import Schema

_IN_MEMORY_BYTES = 256 << 20


class Snapshot:
    """A copy of what a source held at its last collect. Made by the training thread; read by one thread, then closed.

    Small shards are copied into memory, others into an unnamed file, which the kernel may write out: an anchor must not
    need a second copy of the shard in memory.

    Args:
        source: to copy.
        folder: on a local disk with room for the shard; None for the system's folder for temporary files.

    Raises:
        StoreUnavailable: no room or no permission there.
    """

    def __init__(self, source: ChangeSource, folder: str | None = None) -> None:
        started = time.perf_counter()
        self.schema: Schema = source.schema
        self.owned: Sequence[OwnedBox] = tuple(source.owned)
        sizes = [item.box.numel * ITEMSIZE[self.schema.tensors[item.tensor].dtype] for item in self.owned]
        self.size_bytes = sum(sizes)
        self._places: dict[tuple[int, Box], int] = {}
        self._buffer = _room(self.size_bytes, folder)
        at = 0
        for region in source.regions():
            flat = np.ascontiguousarray(region.bits).reshape(-1).view(np.uint8)
            self._places[region.tensor, region.box] = at
            self._buffer[at : at + flat.nbytes] = flat.data
            at += flat.nbytes
        assert at == self.size_bytes, "the source's regions are not its owned boxes"
        self.seconds = time.perf_counter() - started

    def regions(self) -> Iterator[Region]:
        """As `ChangeSource.regions`, of the version that was copied."""
        for item in self.owned:
            yield Region(tensor=item.tensor, box=item.box, bits=self.read(item.tensor, item.box))

    def read(self, tensor: int, box: Box) -> Bits:
        """Bits of one owned box, of its shape; valid until `close`."""
        dtype = np.dtype(f"<u{ITEMSIZE[self.schema.tensors[tensor].dtype]}")
        return np.frombuffer(self._buffer, dtype, box.numel, self._places[tensor, box]).reshape(box.shape)

    def close(self) -> None:
        """Give the room back, once the last array is gone."""
        self._places.clear()
        self._buffer = memoryview(b"")


def _room(size_bytes: int, folder: str | None) -> memoryview:
    if size_bytes <= _IN_MEMORY_BYTES:
        return memoryview(bytearray(size_bytes))
    where = tempfile.gettempdir() if folder is None else folder
    try:
        fd, name = tempfile.mkstemp(prefix="torch_delta-anchor-", dir=where)
        try:
            Path(name).unlink()
            os.posix_fallocate(fd, 0, size_bytes)
            return memoryview(mmap.mmap(fd, size_bytes))
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreUnavailable(
            f"no room for a copy of {size_bytes} bytes of this rank's shard in {where}: {error}; set "
            "anchor_spool_dir to a folder with room",
            path=where,
            operation="copy a shard",
        ) from error
