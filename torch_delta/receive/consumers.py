"""Who on this host still needs which absolute patch.

A consumer (an engine that follows the checkpoint) holds a lock on its own file for as long as it lives, so the kernel
tells a dead one from a slow one: no lease to renew, no pid to guess about, and containers may share the folder.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self

from torch_delta.errors import CheckpointBusy
from torch_delta.receive.diskio import local_io
from torch_delta.receive.locks import FileLock

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_TAKEOVER_S = 2.0
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class Consumer:
    """A registered consumer of a checkpoint's patches; use as a context manager or call `close`.

    Patches of versions above the last one given to `applied` are kept while this object (or its process) lives.
    """

    def __init__(self, folder: Path, consumer_id: str, version: int) -> None:
        if _ID.fullmatch(consumer_id) is None:
            raise ValueError(f"consumer id {consumer_id!r}: expected 1 to 128 letters, digits, '.', '_' or '-'")
        self.id = consumer_id
        self._path = folder / f"{consumer_id}.version"
        with local_io(folder, "register a consumer"):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / f"{consumer_id}.lock", f"consume patches as {consumer_id}")
        # Not 0: somebody looking for dead consumers may hold it for a moment.
        self._lock.acquire(exclusive=True, timeout_s=_TAKEOVER_S)
        try:
            self.version = version
            self.applied(version)
        except BaseException:
            self._lock.release()
            raise

    def applied(self, version: int) -> None:
        """Say that this consumer has applied every version up to `version` and needs their patches no more."""
        with local_io(self._path, "note a consumer's version"):
            temporary = self._path.with_suffix(".new")
            temporary.write_text(str(version))
            temporary.replace(self._path)
        self.version = version

    def close(self) -> None:
        """Deregister: nothing is kept for this consumer any longer."""
        if self._lock.held:
            self._path.unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def oldest_needed(folder: Path) -> int | None:
    """Lowest version that a live consumer has applied, or None without live consumers; removes dead ones' files.

    The caller holds the writer lock.
    """
    lowest: int | None = None
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return None
    for name in names:
        if not name.endswith(".version"):
            continue
        probe = FileLock(folder / f"{name.removesuffix('.version')}.lock", "look for dead consumers")
        try:
            probe.acquire(exclusive=True, timeout_s=0)
        except CheckpointBusy:
            try:
                version = int((folder / name).read_text())
            except (OSError, ValueError):
                continue  # closing at this moment
            lowest = version if lowest is None else min(lowest, version)
        else:
            (folder / name).unlink(missing_ok=True)
            probe.release()
    return lowest
