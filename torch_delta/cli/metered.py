"""A store that tells how many bytes of weights were read from it: what progress bars of receiving commands run on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch_delta.format.keys import ANCHORS_PREFIX, PARTS_PREFIX
from torch_delta.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch_delta.store import Created, ObjectInfo
    from torch_delta.store.base import BytesLike, Data


class Metered(Store):
    """Passes every call on to `inner`, and counts what `get` and `get_range` read of parts and anchors.

    Args:
        inner: the store that does the work; closed with this one.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._listeners: list[Callable[[int], object]] = []

    @contextlib.contextmanager
    def telling(self, on_bytes: Callable[[int], object]) -> Iterator[None]:
        """Tell `on_bytes` the length of every read inside the block, from the threads that read."""
        self._listeners.append(on_bytes)
        try:
            yield
        finally:
            self._listeners.remove(on_bytes)

    def _count(self, key: str, data: bytes) -> bytes:
        is_manifest = key.count("/") == 1
        if key.startswith((PARTS_PREFIX, ANCHORS_PREFIX)) and not is_manifest:
            for listener in tuple(self._listeners):
                listener(len(data))
        return data

    @property
    def url(self) -> str:
        """The inner store's."""
        return self._inner.url

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Counted."""
        return self._count(key, self._inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Counted."""
        return self._count(key, self._inner.get_range(key, start, length))

    def stat(self, key: str) -> ObjectInfo:
        """The inner store's."""
        return self._inner.stat(key)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """The inner store's."""
        return self._inner.list(prefix, start_after=start_after)

    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """The inner store's."""
        return self._inner.put_new(key, data)

    def put_hint(self, key: str, data: BytesLike) -> None:
        """The inner store's."""
        self._inner.put_hint(key, data)

    def delete(self, key: str) -> None:
        """The inner store's."""
        self._inner.delete(key)

    def open_local(self, key: str) -> Path | None:
        """The inner store's; what is read through the file is not counted."""
        return self._inner.open_local(key)

    def copy(self, source: str, key: str) -> ObjectInfo | None:
        """The inner store's."""
        return self._inner.copy(source, key)

    def create_or_same(self, key: str, data: BytesLike | tuple[BytesLike, ...]) -> Created:
        """The inner store's."""
        return self._inner.create_or_same(key, data)

    def sibling(self, root: str) -> Store:
        """One that tells the same listeners."""
        beside = Metered(self._inner.sibling(root))
        beside._listeners = self._listeners
        return beside

    def sweep_temporary(self, *, older_than_s: float) -> int:
        """The inner store's."""
        return self._inner.sweep_temporary(older_than_s=older_than_s)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()
