"""The directories of a local store: made durably, emptied, and the temporary files in them. Raises plain OSError."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.store import posix

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger("torch_delta")

_MOST_REMEMBERED_DIRECTORIES = 4096
_MOST_LOST_DIRECTORIES = 100  # a put that loses its directory to deletions so often in a row gives up


@dataclass(slots=True)
class Temporary:
    """A temporary file that is being written: open descriptors, and whether its name still exists."""

    directory: int
    name: str
    file: int
    is_there: bool = True


class Tree:
    """Everything below `root` that is not an object itself. Thread-safe.

    Args:
        root: absolute path; made when something is first written.
        fsync: False makes nothing durable.
    """

    def __init__(self, root: Path, *, fsync: bool) -> None:
        self.root = root
        self.fsync = fsync
        self._durable: set[tuple[str, ...]] = set()  # directories whose own entry this instance has synced

    def make_temporary(self, folders: Sequence[str]) -> Temporary:
        """A fresh temporary file in a directory below the root, which is made if needed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        name = posix.temporary_name()
        num_left = _MOST_LOST_DIRECTORIES
        while True:
            try:
                directory = self._make_directories(folders)
                try:
                    return Temporary(directory, name, os.open(name, flags, 0o666, dir_fd=directory))
                except BaseException:
                    os.close(directory)
                    raise
            except FileNotFoundError:
                # A deletion emptied and removed a directory between two of our calls; or the root is gone for good.
                num_left -= 1
                if not folders or num_left == 0:
                    raise

    def link_again(self, source: Sequence[str], target: Sequence[str]) -> bool | None:
        """Give a file below the root a second name, durably; see `posix.link_again`.

        Raises:
            FileNotFoundError: the source is gone, or a directory of the target was removed meanwhile.
        """
        directory = self._make_directories(target[:-1])
        try:
            with posix.open_below(self.root, source[:-1]) as origin:
                made = posix.link_again(source[-1], target[-1], origin, directory)
            if made:
                self.sync_directory(directory)
            return made
        finally:
            os.close(directory)

    def _make_directories(self, folders: Sequence[str]) -> int:
        """Open a directory below the root, making what is missing; every new entry is durable before it is used."""
        if ("",) not in self._durable:
            self._make_root()
        directory = os.open(self.root, posix.DIRECTORY)
        try:
            for depth, folder in enumerate(folders, start=1):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o777, dir_fd=directory)
                child = posix.open_child(folder, directory)
                # Also if another process made it: that one may die before it has synced, we must not build on it.
                self._sync_entry(tuple(folders[:depth]), directory)
                os.close(directory)
                directory = child
        except BaseException:
            os.close(directory)
            raise
        return directory

    def _make_root(self) -> None:
        missing = []
        path = self.root
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o777)
            parent = os.open(path.parent, posix.DIRECTORY)
            try:
                self.sync_directory(parent)
            finally:
                os.close(parent)
        self._durable.add(("",))

    def _sync_entry(self, folders: tuple[str, ...], parent: int) -> None:
        if folders in self._durable:
            return
        self.sync_directory(parent)
        if len(self._durable) >= _MOST_REMEMBERED_DIRECTORIES:
            self._durable = {("",)}
        self._durable.add(folders)

    def remove_empty(self, folders: Sequence[str]) -> None:
        """Remove directories that became empty, innermost first; never the root, never an error.

        Those directly below the root stay: they are few, and every writer needs them again.
        """
        for depth in range(len(folders), 1, -1):
            try:
                with posix.open_below(self.root, folders[: depth - 1]) as parent:
                    os.rmdir(folders[depth - 1], dir_fd=parent)
            except OSError:
                return
            self._durable.discard(tuple(folders[:depth]))

    def quietly_remove(self, temporary: Temporary) -> None:
        """Remove a temporary name if it still exists; a failure is logged."""
        if not temporary.is_there:
            return
        try:
            posix.remove(temporary.name, temporary.directory)
            temporary.is_there = False
        except OSError as error:  # the sweep will get it; the object itself is not affected
            logger.warning("%s: could not remove the temporary file %s: %s", self.root, temporary.name, error)

    def sync(self, file: int) -> None:
        """fsync, unless switched off."""
        if self.fsync:
            os.fsync(file)

    def sync_directory(self, directory: int) -> None:
        """Make the entries of a directory durable, unless switched off."""
        if self.fsync:
            posix.sync_directory(directory)

    def now_s(self) -> float:
        """The time by the clock that stamps the files, which on a network file system is not this host's."""
        name = posix.temporary_name()
        with posix.open_below(self.root, ()) as directory:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory))
            try:
                return os.stat(name, dir_fd=directory).st_mtime
            finally:
                posix.remove(name, directory)
