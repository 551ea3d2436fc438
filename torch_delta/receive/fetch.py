"""Bringing stored objects to this host, proved to be the bytes that their manifest names.

Length and sha256 are checked before anybody parses a byte. Small versions stay in memory; the parts of large ones are
written to unnamed local files in blocks and mapped from there, so that many gigabytes cost a few blocks and no more.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError
from torch_delta.receive.diskio import local_io
from torch_delta.receive.workers import run_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from torch_delta.store import Store

_IN_MEMORY_BYTES = 256 << 20  # of one version together
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object as its manifest describes it."""

    key: str
    stored_bytes: int
    sha256: str


def fetch_all(store: Store, wanted: Sequence[Wanted], scratch: Path, pool: ThreadPoolExecutor) -> list[memoryview]:
    """Fetch objects in parallel, in the order asked for; see `fetch`.

    When one fails, those not yet begun are cancelled.
    """
    in_memory = sum(item.stored_bytes for item in wanted) <= _IN_MEMORY_BYTES
    return run_all(pool, lambda item: fetch(store, item, None if in_memory else scratch), wanted)


def fetch(store: Store, wanted: Wanted, scratch: Path | None) -> memoryview:
    """Bytes of one object; read-only, and gone from disk with the last view of them.

    Args:
        store: where it is.
        wanted: key, length and sha256 it must have.
        scratch: folder on a local disk to keep it in, or None for memory.

    Raises:
        ObjectNotFound: it is not there (any more).
        FormatError: it is not the object that its manifest names (rule R5).
        StoreUnavailable: no clear answer, or no room in `scratch`.
    """
    if scratch is not None:
        return _fetch_to_disk(store, wanted, scratch)
    data = store.get(wanted.key, max_bytes=wanted.stored_bytes)
    _check(wanted, len(data), hashlib.sha256(data).hexdigest())
    return memoryview(data)


def _fetch_to_disk(store: Store, wanted: Wanted, scratch: Path) -> memoryview:
    size_bytes = store.stat(wanted.key).size_bytes
    if size_bytes != wanted.stored_bytes:
        _check(wanted, size_bytes, "")
    digest = hashlib.sha256()
    with local_io(scratch, f"keep {wanted.key}"), tempfile.TemporaryFile(dir=scratch) as file:
        for start in range(0, size_bytes, _BLOCK_BYTES):
            block = store.get_range(wanted.key, start, min(_BLOCK_BYTES, size_bytes - start))
            digest.update(block)
            file.write(block)
        file.flush()
        _check(wanted, size_bytes, digest.hexdigest())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def fetch_to_file(store: Store, wanted: Wanted, target: Path) -> None:
    """Write one object to the new file `target`, synced; same errors as `fetch`."""
    digest = hashlib.sha256()
    size_bytes = store.stat(wanted.key).size_bytes
    if size_bytes == wanted.stored_bytes:
        with local_io(target, f"keep {wanted.key}"), target.open("xb") as file:
            for start in range(0, size_bytes, _BLOCK_BYTES):
                block = store.get_range(wanted.key, start, min(_BLOCK_BYTES, size_bytes - start))
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    _check(wanted, size_bytes, digest.hexdigest())


def _check(wanted: Wanted, size_bytes: int, sha256: str) -> None:
    if size_bytes != wanted.stored_bytes:
        raise FormatError(
            f"{wanted.key}: {size_bytes} bytes, its manifest says {wanted.stored_bytes}; it was cut off or replaced",
            rule="R5",
            key=wanted.key,
            expected=wanted.stored_bytes,
            got=size_bytes,
        )
    if sha256 != wanted.sha256:
        raise FormatError(
            f"{wanted.key}: sha256 {sha256}, its manifest says {wanted.sha256}; the object is damaged or replaced",
            rule="R5",
            key=wanted.key,
            expected=wanted.sha256,
            got=sha256,
        )
