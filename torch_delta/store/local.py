"""A store in a directory, local or on a network file system, that survives being killed at any instruction.

One `put_new`: a temporary file with a unique name beside the target, all bytes, fsync, link(2) to the real name (which
fails if it is taken), unlink of the temporary, fsync of the directory and of the parent of every new directory. So a
name appears only when its bytes are complete and on disk. What a killed process leaves is a file whose name starts with
``.tmp-``; no key does, listings skip them, and `sweep_temporary` removes old ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from torch_delta.crashpoints import reach
from torch_delta.errors import ObjectExists, ObjectNotFound
from torch_delta.format.keys import validate_key
from torch_delta.store import posix
from torch_delta.store.answers import reading, writing
from torch_delta.store.base import BytesLike, Data, ObjectInfo, Store, views
from torch_delta.store.keycheck import check_prefix, is_key, range_error, too_long
from torch_delta.store.sibling import sibling_url
from torch_delta.store.tree import Temporary, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_RACES = 100  # a copy that loses its directory to deletions so often in a row gives up


class LocalStore(Store):
    """Objects as files below `root`.

    The root is made at the first put. It may be a symbolic link itself; links below it are refused. Directories that a
    deletion empties are removed.

    Args:
        root: the directory; made absolute now, not expanded (`open_store` expands ``~``).
        fsync: False gives up crash safety against power failure (not against killed processes). For benchmarks only.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True) -> None:
        self._root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow the links
        self._tree = Tree(self._root, fsync=fsync)

    @property
    def url(self) -> str:
        """``file:///...``, percent-encoded."""
        return self._root.as_uri()

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole file."""
        with self._open(key, "get") as file:
            size_bytes = os.fstat(file).st_size
            if max_bytes is not None and size_bytes > max_bytes:
                raise too_long(self.url, key, size_bytes, max_bytes)
            return posix.read_exactly(file, 0, size_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a part of a file."""
        if start < 0 or length < 0:
            raise ValueError(f"start and length must not be negative, got {start} and {length}")
        with self._open(key, "get_range") as file:
            data = posix.read_exactly(file, start, length)
            size_bytes = os.fstat(file).st_size
        if len(data) != length or start > size_bytes:
            raise range_error(self.url, key, start, length, size_bytes)
        return data

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of a file."""
        *folders, name = self._segments(key)
        with reading(self._root, key, "stat"), posix.open_below(self._root, folders) as directory:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                code = errno.ELOOP if stat.S_ISLNK(found.st_mode) else errno.EISDIR
                raise OSError(code, os.strerror(code), name)
            return ObjectInfo(key, found.st_size, found.st_mtime)

    def open_local(self, key: str) -> Path:
        """The file itself."""
        self.stat(key)
        return self._root / key

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Walk the directories in key order; links, temporary files and names that are no keys are passed over."""
        check_prefix(prefix)
        return self._walk(tuple(prefix.split("/")[:-1]), prefix, start_after)

    def _walk(self, folders: tuple[str, ...], prefix: str, start_after: str | None) -> Iterator[ObjectInfo]:
        entries: list[tuple[str, ObjectInfo | None]] = []  # a key, or a folder with its closing slash and None
        try:
            with (
                reading(self._root, prefix, "list"),
                posix.open_below(self._root, folders) as directory,
                os.scandir(directory) as scan,
            ):
                for entry in scan:
                    entries.extend(_listed(entry, prefix, start_after))
        except ObjectNotFound:
            return  # no such folder, or it was removed while we walked: a definite answer, unlike any other error
        # A folder sorts by its name with the slash, which is how its keys compare with a sibling "name.json".
        for key, info in sorted(entries, key=lambda entry: entry[0]):
            if info is None:
                yield from self._walk(tuple(key.split("/")[:-1]), key, start_after)
            else:
                yield info

    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """Write a temporary file and link it to its name."""
        *folders, name = self._segments(key)
        with self._temporary(key, folders) as temporary:
            size_bytes = self._fill(key, temporary.file, data)
            reach("store.temp_written")
            with writing(self._root, key, "put_new"):
                self._tree.sync(temporary.file)
                modified_s = os.fstat(temporary.file).st_mtime
            reach("store.temp_synced")
            with writing(self._root, key, "put_new", "naming"):
                won = posix.publish_new(temporary.name, name, temporary.directory)
            reach("store.linked")
            if not won:
                raise ObjectExists(f"{self.url}: {key} exists already", key=key, url=self.url, operation="put_new")
            self._tree.quietly_remove(temporary)
            reach("store.temp_removed")
            with writing(self._root, key, "put_new", "named"):
                self._tree.sync_directory(temporary.directory)
            reach("store.directory_synced")
        return ObjectInfo(key, size_bytes, modified_s)

    def copy(self, source: str, key: str) -> ObjectInfo | None:
        """A second link to the file, where the file system has links; objects never change, so sharing bytes is safe.

        The time of a file is one for all its links, so the source becomes younger. It does so before the link is made:
        at no moment is there a new object that retention takes for an old one.
        """
        for _ in range(_MOST_RACES):
            self.stat(source)
            with writing(self._root, key, "copy", "naming"):
                try:
                    made = self._tree.link_again(self._segments(source), self._segments(key))
                except FileNotFoundError:
                    continue  # a deletion removed the source, or a directory that it emptied: look again
            if made is None:
                return None
            if not made:
                raise ObjectExists(f"{self.url}: {key} exists already", key=key, url=self.url, operation="copy")
            return self.stat(key)
        with writing(self._root, key, "copy"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)

    def sibling(self, root: str) -> LocalStore:
        """A directory beside this one."""
        return LocalStore(unquote(urlsplit(sibling_url(self.url, root)).path), fsync=self._tree.fsync)

    def put_hint(self, key: str, data: BytesLike) -> None:
        """Write a temporary file and rename it over the old one."""
        *folders, name = self._segments(key)
        with self._temporary(key, folders) as temporary:
            self._fill(key, temporary.file, data)
            reach("store.hint_written")
            # Not synced: nothing depends on a hint, and readers treat a damaged one as absent.
            with writing(self._root, key, "put_hint", "naming"):
                os.rename(temporary.name, name, src_dir_fd=temporary.directory, dst_dir_fd=temporary.directory)
                temporary.is_there = False
            reach("store.hint_renamed")

    def delete(self, key: str) -> None:
        """Unlink a file, and the directories that this empties."""
        *folders, name = self._segments(key)
        with writing(self._root, key, "delete", "naming"):
            try:
                with posix.open_below(self._root, folders) as directory:
                    posix.remove(name, directory)
                    reach("store.deleted")
                    # Commits are deleted before their parts; without this a power failure could bring one back.
                    self._tree.sync_directory(directory)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return  # no such folder, or the name is a folder: there is no such object
        self._tree.remove_empty(folders)

    def sweep_temporary(self, *, older_than_s: float) -> int:
        """Remove temporary files of dead processes; a live writer touches its own with every write."""
        num_removed = 0
        with writing(self._root, "", "sweep_temporary"):
            if not self._root.is_dir():
                return 0
            now_s = self._tree.now_s()
            for _, _, names, directory in os.fwalk(self._root, follow_symlinks=False):
                for name in names:
                    if name.startswith(posix.TEMPORARY):
                        with contextlib.suppress(FileNotFoundError):  # its writer finished in this moment
                            age_s = now_s - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
                            if age_s > older_than_s:
                                num_removed += posix.remove(name, directory)
        return num_removed

    def _make_durable(self, key: str) -> None:
        with (
            writing(self._root, key, "create_or_same", "named"),
            posix.open_below(self._root, self._segments(key)[:-1]) as directory,
        ):
            self._tree.sync_directory(directory)

    def _segments(self, key: str) -> tuple[str, ...]:
        validate_key(key)
        return tuple(key.split("/"))

    @contextlib.contextmanager
    def _open(self, key: str, operation: str) -> Iterator[int]:
        *folders, name = self._segments(key)
        with reading(self._root, key, operation):
            with posix.open_below(self._root, folders) as directory:
                file = posix.open_file(name, directory)
            try:
                yield file
            finally:
                os.close(file)

    @contextlib.contextmanager
    def _temporary(self, key: str, folders: Sequence[str]) -> Iterator[Temporary]:
        """A temporary file in the target's directory; gone at the end, however the block ends short of a kill."""
        with writing(self._root, key, "put"):
            temporary = self._tree.make_temporary(folders)
        try:
            reach("store.temp_created")
            yield temporary
        finally:
            os.close(temporary.file)
            self._tree.quietly_remove(temporary)
            os.close(temporary.directory)

    def _fill(self, key: str, file: int, data: Data) -> int:
        size_bytes = 0
        for view in views(data):  # what the iterable raises is the caller's and passes through as it is
            with writing(self._root, key, "put"):
                posix.write_all(file, view)
            size_bytes += len(view)
        return size_bytes


def _listed(entry: os.DirEntry[str], prefix: str, start_after: str | None) -> Iterator[tuple[str, ObjectInfo | None]]:
    """What a directory entry contributes to a listing: nothing if it is no key, a link, or not after `start_after`."""
    key = prefix + entry.name
    try:
        if entry.is_dir(follow_symlinks=False):
            folder = f"{key}/"
            after = start_after is None or folder > start_after or start_after.startswith(folder)
            if after and not entry.name.startswith("."):
                yield folder, None
        elif entry.is_file(follow_symlinks=False) and (start_after is None or key > start_after) and is_key(key):
            found = entry.stat(follow_symlinks=False)
            yield key, ObjectInfo(key, found.st_size, found.st_mtime)
    except FileNotFoundError:  # removed while we looked
        return
