"""Local file operations that a checkpoint's safety rests on: named errors, durable replacement, cheap copies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from torch_delta.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_COPY_BYTES = 16 << 20
_FICLONE = 0x40049409  # Linux: share the source's extents copy-on-write (btrfs, xfs, bcachefs)
_HINTS = {
    errno.ENOSPC: "the disk is full: free some space and run the same call again",
    errno.EDQUOT: "the quota is used up: free some space and run the same call again",
    errno.EACCES: "this user may not write there: fix the permissions or choose another path",
    errno.EPERM: "this user may not write there: fix the permissions or choose another path",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENOTDIR: "a file lies where a folder must be: choose another path",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
}


@contextlib.contextmanager
def local_io(path: Path, operation: str) -> Iterator[None]:
    """Turn an OSError from the block into StoreUnavailable with the path, the operation and what to do.

    The checkpoint keeps its version: every change of it is journalled before it is made.
    """
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "the checkpoint keeps its version; run the same call again")
        raise StoreUnavailable(
            f"cannot {operation} at {path}: {error.strerror or error}; {hint}",
            path=str(path),
            operation=operation,
            errno=error.errno,
        ) from error


def check_room(path: Path, needed_bytes: int) -> None:
    """StoreUnavailable unless the file system of `path` has that much room for this user."""
    room = os.statvfs(path)
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < needed_bytes:
        raise StoreUnavailable(
            f"{path}: {free_bytes} bytes free, up to {needed_bytes} needed; free some and run the same call again",
            path=str(path),
            operation="write weights",
            expected=needed_bytes,
            got=free_bytes,
        )


def sync_dir(path: Path) -> None:
    """Make names created, renamed or removed in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make the bytes of a file survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a new file and sync its bytes; the caller renames it and syncs the folder."""
    with path.open("wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())


def replace_synced(temporary: Path, target: Path) -> None:
    """Rename over `target` and sync its folder: after this the new content is what any crash leaves."""
    temporary.replace(target)
    sync_dir(target.parent)


def put_in_place(temporary: Path, target: Path, *, fsync: bool) -> None:
    """Make a written file current under its name, durably if `fsync`."""
    if fsync:
        sync_file(temporary)
        replace_synced(temporary, target)
    else:
        temporary.replace(target)


def _copy_bytes(source_fd: int, target_fd: int) -> None:
    """Copy from the start of one open file to the start of another, in writes of many MiB.

    Not inside the kernel (copy_file_range): that fills the page cache page by page, and mapped writes then fault for
    each of them; what one large write brings in is mapped by pages of 2 MiB, and a version is written five times as
    fast (ADR 9).
    """
    block = memoryview(bytearray(_COPY_BYTES))
    while size := os.readv(source_fd, [block]):
        view = block[:size]
        while view:
            view = view[os.write(target_fd, view) :]


def copy_file(source: Path, target: Path) -> bool:
    """Copy `source` (links resolved) to the new file `target`, writable by its owner and synced.

    Shares the extents copy-on-write where the file system can, else copies the bytes. The source is read with
    read-like calls only, never mapped (F82).

    Returns:
        Whether extents are shared: later writes then need free blocks.
    """
    shared = False
    with source.open("rb") as reader, target.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            shared = True
        except OSError:
            _copy_bytes(reader.fileno(), writer.fileno())
        writer.flush()
        os.fsync(writer.fileno())
    return shared
