"""Who may look at the weight files, who may change them, and how the two wait for each other.

Readers share `weights`; a writer takes it alone, only while bytes change. Readers pass the `turnstile` on their way in
and a waiting writer holds it, so a stream of readers cannot keep a writer out for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING

from torch_delta.receive.diskio import local_io
from torch_delta.receive.locks import FileLock
from torch_delta.receive.state import Layout, State, boot_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def exclusive(layout: Layout, timeout_s: float) -> Iterator[None]:
    """No reader is inside and none comes in; for the holder of the writer lock.

    Raises:
        CheckpointBusy, DeadlineExceeded: readers did not leave in time; the error names one.
    """
    deadline = time.monotonic() + timeout_s
    turnstile = FileLock(layout.turnstile_lock, "change the weights")
    weights = FileLock(layout.weights_lock, "change the weights")
    turnstile.acquire(exclusive=True, timeout_s=timeout_s)
    try:
        weights.acquire(exclusive=True, timeout_s=max(0.0, deadline - time.monotonic()))
        try:
            yield
        finally:
            weights.release()
    finally:
        turnstile.release()


def share(layout: Layout, timeout_s: float) -> FileLock:
    """Come in as a reader; the caller releases the lock it gets."""
    deadline = time.monotonic() + timeout_s
    turnstile = FileLock(layout.turnstile_lock, "read the weights")
    weights = FileLock(layout.weights_lock, "read the weights")
    turnstile.acquire(exclusive=False, timeout_s=timeout_s)
    try:
        weights.acquire(exclusive=False, timeout_s=max(0.0, deadline - time.monotonic()))
    finally:
        turnstile.release()
    return weights


def needs_recovery(layout: Layout, state: State | None) -> bool:
    """Whether the weight files may be torn; exact for a holder of `weights`, a hint for others."""
    if layout.install.exists() or layout.next.exists():
        return True
    return state is not None and needs_replay(state)


def needs_replay(state: State) -> bool:
    """Whether the page cache that held writes nobody synced may be gone: the machine restarted since."""
    current = boot_id()
    return state.synced_version < state.version and not state.damage and (not current or current != state.boot_id)


class StateReader:
    """Reads the current state, from memory while the file is still the same one. Any thread may call it.

    The file stays open, so its inode cannot be given to another file: the same inode under the same name is the same
    state, which modification times could not promise for versions that follow within a clock tick.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._state: State | None = None

    def read(self) -> State | None:
        """The current state, or None if the checkpoint has none yet.

        Raises:
            FormatError: the record is damaged.
            StoreUnavailable: it cannot be read, or the checkpoint's path is no folder.
        """
        with self._lock, local_io(self._path, "read the state of the checkpoint"):
            try:
                now = self._path.stat()
            except FileNotFoundError:
                self._drop()
                return None
            if self._fd is None or not os.path.samestat(os.fstat(self._fd), now):
                self._drop()
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    with open(fd, "rb", closefd=False) as stream:
                        self._state = State.from_bytes(stream.read(), self._path)
                except BaseException:
                    os.close(fd)
                    raise
                self._fd = fd
            return self._state

    def _drop(self) -> None:
        fd, self._fd, self._state = self._fd, None, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the file; the next `read` opens it again."""
        with self._lock:
            self._drop()

    def __del__(self) -> None:
        self._drop()
