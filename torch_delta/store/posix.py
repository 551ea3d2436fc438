"""Crash-safe file operations below one root, all relative to directory descriptors. Raises plain OSError.

Paths are never joined and handed to the kernel as a whole: every directory is opened from its parent with O_NOFOLLOW,
so a symbolic link below the root cannot lead a key out of it, not even one that is swapped in at the last moment.
Opening each directory also makes NFS clients revalidate what they cached about it, negative entries included.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TEMPORARY = ".tmp-"  # no key segment starts with a dot, so a temporary name is never a key
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
RENAME_NOREPLACE = 1
# What file systems without hard links answer to link(2): vfat and FUSE EPERM, SMB ENOTSUP, some FUSE ENOSYS.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
# What file systems without fsync on directories answer: SMB EINVAL, some FUSE ENOTSUP or EBADF.
NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS}


def temporary_name() -> str:
    """A name that no other process of any host uses: a pid would not be enough on a shared file system."""
    return f"{TEMPORARY}{uuid.uuid4().hex}"


def open_child(name: str, directory: int) -> int:
    """Open the directory `name` in `directory`.

    Raises:
        OSError: ELOOP if it is a symbolic link, ENOTDIR if it is a file, as usual otherwise.
    """
    try:
        return os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except NotADirectoryError as error:
        # Linux answers ENOTDIR for O_NOFOLLOW | O_DIRECTORY on a link; tell the two apart.
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from error
        raise


@contextlib.contextmanager
def open_below(root: Path, segments: Sequence[str]) -> Iterator[int]:
    """Open an existing directory below `root`; the descriptor is closed at the end of the block.

    Raises:
        OSError: ENOENT, ENOTDIR, ELOOP (a link below the root) or what the file system says.
    """
    directory = os.open(root, DIRECTORY)
    try:
        for segment in segments:
            child = open_child(segment, directory)
            os.close(directory)
            directory = child
        yield directory
    finally:
        os.close(directory)


def open_file(name: str, directory: int) -> int:
    """Open a regular file for reading.

    Raises:
        OSError: ELOOP for a symbolic link, EISDIR for anything else that is not a file.
    """
    # O_NONBLOCK: opening a pipe that somebody left in the directory would wait for its writer for ever.
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    return file


def read_exactly(file: int, start: int, length: int) -> bytes:
    """Bytes start .. start + length of an open file; fewer only if the file ends before."""
    pieces = []
    while length > 0:
        piece = os.pread(file, min(length, 1 << 30), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_all(file: int, view: memoryview) -> None:
    """Write a whole flat byte view; one write(2) takes at most about 2 GiB."""
    while view:
        view = view[os.write(file, view) :]


def sync_directory(directory: int) -> None:
    """Make the entries of a directory durable, as far as the file system knows how."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:
            raise


def publish_new(temporary: str, name: str, directory: int) -> bool:
    """Give a finished temporary file its name unless the name is taken.

    link(2) is atomic and fails when the target exists, which rename(2) does not; where links are not supported,
    renameat2(RENAME_NOREPLACE) is the same. The temporary name may still exist afterwards.

    Returns:
        True if this call made the name, False if it was taken.

    Raises:
        OSError: neither is supported, or no clear answer; the name was then certainly not made by this call unless the
            error came from a network file system that lost the reply and the check below as well.
    """
    try:
        os.link(temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        # NFS: the link was made, the reply lost, the retransmission refused. Only we know the temporary name, so a
        # second link to it is ours.
        if _num_links(temporary, directory) == 2:
            return True
        if error.errno == errno.EEXIST:
            return False
        if error.errno not in NO_LINKS:
            raise
        return _rename_noreplace(temporary, name, directory)
    return True


def link_again(source: str, name: str, origin: int, directory: int) -> bool | None:
    """Give a file a second name, and both the time of now.

    Args:
        source: the file's name in the directory `origin`.
        name: the new one in `directory`.
        origin: descriptor.
        directory: descriptor.

    Returns:
        True if this call made the name, False if it was taken, None if this file cannot have a second one: no links
        here, or not this user's file.

    Raises:
        OSError: no clear answer.
    """
    try:
        os.utime(source, dir_fd=origin, follow_symlinks=False)
        os.link(source, name, src_dir_fd=origin, dst_dir_fd=directory, follow_symlinks=False)
    except FileExistsError:
        # As in `publish_new`: on NFS the reply to our own link may be lost.
        mine, there = (os.stat(n, dir_fd=d, follow_symlinks=False) for n, d in ((source, origin), (name, directory)))
        return os.path.samestat(mine, there)
    except OSError as error:
        if error.errno in NO_LINKS | {errno.EACCES, errno.EXDEV}:
            return None
        raise
    return True


def _num_links(name: str, directory: int) -> int:
    return os.stat(name, dir_fd=directory, follow_symlinks=False).st_nlink


def _rename_noreplace(temporary: str, name: str, directory: int) -> bool:
    renameat2 = _renameat2()
    if renameat2 is None:
        raise OSError(errno.ENOTSUP, "this C library has no renameat2", name)
    if renameat2(directory, os.fsencode(temporary), directory, os.fsencode(name), RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, f"neither link nor exclusive rename: {os.strerror(code)}", name)


@functools.cache
def _renameat2() -> Any:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def remove(name: str, directory: int) -> bool:
    """Unlink a file; False if it was not there."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True
