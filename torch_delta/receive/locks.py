"""Advisory locks between the processes and threads of one host.

    turnstile ──► weights        readers share both for a moment, then only `weights`; a writer takes both alone
    writer                       one process at a time downloads, decodes and writes

`flock` belongs to an open file, not to a process: two threads exclude each other as two processes do, and the kernel
drops the lock with its holder, however that dies. A forked child inherits open files, so it closes the locks it did not
ask for (F79): otherwise a worker started by `fork` would hold its parent's lock for as long as it lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from torch_delta.errors import CheckpointBusy, DeadlineExceeded, StoreUnavailable

_HOLDER_BYTES = 240
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()
_fork_hook_installed = False


def _drop_inherited() -> None:
    for lock in list(_held):
        lock._forget()


class FileLock:
    """One acquisition of a lock file; not reentrant, and any thread may release it.

    Args:
        path: the lock file; created when the folder can be written, else opened read-only.
        purpose: what the holder is doing, for the error another process shows while it waits.
    """

    def __init__(self, path: Path, purpose: str) -> None:
        self.path = path
        self.purpose = purpose
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock now."""
        return self._fd is not None

    def acquire(self, *, exclusive: bool, timeout_s: float) -> None:
        """Take the lock, waiting up to `timeout_s` seconds (0 tries once).

        Raises:
            CheckpointBusy: it was held and `timeout_s` is 0; `holder` names who holds it, as far as known.
            DeadlineExceeded: it was still held after `timeout_s`; same facts, chained from CheckpointBusy.
            StoreUnavailable: the lock file could not be opened, or this file system has no locks.
        """
        assert self._fd is None, "acquired twice"
        fd = _open(self.path)
        try:
            self._wait(fd, exclusive=exclusive, timeout_s=timeout_s)
            if exclusive:
                _write_holder(fd, self.purpose)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _install_fork_hook()
        _held.add(self)

    def _wait(self, fd: int, *, exclusive: bool, timeout_s: float) -> None:
        mode = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(fd, mode)
            except OSError as error:
                if error.errno not in {errno.EWOULDBLOCK, errno.EACCES, errno.EINTR}:
                    raise StoreUnavailable(
                        f"cannot lock {self.path}: {error.strerror}; the folder must be on a file system with flock",
                        path=str(self.path),
                        operation="lock",
                    ) from error
            else:
                return
            if time.monotonic() >= deadline:
                holder = holder_of(self.path)
                busy = CheckpointBusy(
                    f"{self.path.parent.parent} is held by {holder}, wanted here to {self.purpose}; wait or stop it",
                    path=str(self.path.parent.parent),
                    holder=holder,
                )
                if timeout_s <= 0:
                    raise busy
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s to {self.purpose}: {busy.message}",
                    phase=self.purpose,
                    peer=holder,
                    timeout_s=timeout_s,
                ) from busy
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self) -> None:
        """Give the lock back; a no-op when it is not held."""
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is not None:
            # Unlock before closing: a child that forked a moment ago may still have the same open file.
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def _forget(self) -> None:
        """In a forked child: close the inherited file without unlocking the parent's lock."""
        fd, self._fd = self._fd, None
        _held.discard(self)
        if fd is not None:
            os.close(fd)


def _install_fork_hook() -> None:
    global _fork_hook_installed  # noqa: PLW0603  a fork hook cannot be removed, so once per process
    if not _fork_hook_installed:
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_drop_inherited)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EROFS, errno.EPERM}:
            raise StoreUnavailable(
                f"cannot open the lock {path}: {error.strerror}", path=str(path), operation="lock"
            ) from error
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # enough for readers of a read-only checkpoint
    except OSError as error:
        raise StoreUnavailable(
            f"cannot open the lock {path}: {error.strerror}; the folder is read-only for this user and was never "
            "opened by one who may write it",
            path=str(path),
            operation="lock",
        ) from error


def _write_holder(fd: int, purpose: str) -> None:
    text = f"process {os.getpid()} on {socket.gethostname()} ({purpose})".encode()
    # Padded instead of truncated: ext4 flushes a file to disk on close when it was truncated and written again. A full
    # disk or a read-only descriptor costs the name in somebody's message, not the lock.
    with contextlib.suppress(OSError):
        os.pwrite(fd, text[:_HOLDER_BYTES].ljust(_HOLDER_BYTES), 0)


def holder_of(path: Path) -> str:
    """Who holds the lock file at `path`: the exclusive holder's own words, or the pids the kernel lists."""
    try:
        pids = _kernel_holders(path)
        text = path.read_bytes()[:_HOLDER_BYTES].decode(errors="replace").strip()
    except OSError:
        return "an unknown process"
    if text and (not pids or any(f"process {pid} " in text for pid in pids)):
        return text
    return f"process {', '.join(map(str, pids))}" if pids else "an unknown process"


def _kernel_holders(path: Path) -> list[int]:
    """Pids of the flocks on `path` (Linux); empty when the kernel does not tell."""
    inode = str(path.stat().st_ino)
    try:
        table = Path("/proc/locks").read_text()
    except OSError:
        return []
    pids = []
    for line in table.splitlines():
        fields = line.split()
        if "FLOCK" in fields and "->" not in fields and fields[-3].rpartition(":")[2] == inode:
            pids.append(int(fields[-4]))
    return sorted(set(pids))
