"""A store in this process's memory, for tests, notebooks and trainers that generate in the same process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.errors import ObjectExists, ObjectNotFound
from torch_delta.format.keys import validate_key
from torch_delta.store.base import BytesLike, Data, ObjectInfo, Store, views
from torch_delta.store.keycheck import check_prefix, range_error, too_long
from torch_delta.store.sibling import sibling_url

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True, weakref_slot=True)
class _Shelf:
    """The objects behind one name: key -> (bytes, creation time)."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_shelves: dict[str, _Shelf] = {}
_shelves_lock = threading.Lock()


class MemoryStore(Store):
    """Objects in a dictionary.

    Args:
        name: stores of one name share their objects within this process, until it ends; other processes, forked ones
            included, see nothing of them. None for a store of its own that goes with the instance.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._beside: dict[str, _Shelf] = {}
        if name is None:
            self._shelf = _Shelf()
        else:
            with _shelves_lock:
                self._shelf = _shelves.setdefault(name, _Shelf())

    @property
    def url(self) -> str:
        """``memory://name``."""
        return f"memory://{self._name if self._name is not None else f'unnamed-{id(self._shelf):x}'}"

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """The stored bytes, not a copy."""
        data, _ = self._find(key, "get")
        if max_bytes is not None and len(data) > max_bytes:
            raise too_long(self.url, key, len(data), max_bytes)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """A slice of the stored bytes."""
        if start < 0 or length < 0:
            raise ValueError(f"start and length must not be negative, got {start} and {length}")
        data, _ = self._find(key, "get_range")
        if start + length > len(data):
            raise range_error(self.url, key, start, length, len(data))
        return data[start : start + length]

    def stat(self, key: str) -> ObjectInfo:
        """Length and time of creation."""
        data, modified_s = self._find(key, "stat")
        return ObjectInfo(key, len(data), modified_s)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A snapshot of the keys."""
        check_prefix(prefix)
        with self._shelf.lock:
            found = [
                ObjectInfo(key, len(data), modified_s)
                for key, (data, modified_s) in self._shelf.objects.items()
                if key.startswith(prefix) and (start_after is None or key > start_after)
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """Join the pieces and keep them."""
        validate_key(key)
        stored = b"".join(views(data))  # before the lock: the iterable may be slow, or use this store
        with self._shelf.lock:
            if key in self._shelf.objects:
                raise ObjectExists(f"{self.url}: {key} exists already", key=key, url=self.url, operation="put_new")
            now_s = time.time()
            self._shelf.objects[key] = (stored, now_s)
        return ObjectInfo(key, len(stored), now_s)

    def copy(self, source: str, key: str) -> ObjectInfo:
        """The same bytes under another name."""
        validate_key(key)
        data, _ = self._find(source, "copy")
        return self.put_new(key, data)

    def sibling(self, root: str) -> MemoryStore:
        """A shelf beside this one; of a store without a name, one that only its siblings reach."""
        name = sibling_url(self.url, root).removeprefix("memory://")
        if self._name is not None:
            return MemoryStore(name)
        store = MemoryStore()
        store._beside = self._beside
        store._shelf = self._beside.setdefault(name, store._shelf)
        return store

    def put_hint(self, key: str, data: BytesLike) -> None:
        """Replace an object."""
        validate_key(key)
        stored = bytes(data)
        with self._shelf.lock:
            self._shelf.objects[key] = (stored, time.time())

    def delete(self, key: str) -> None:
        """Forget an object."""
        validate_key(key)
        with self._shelf.lock:
            self._shelf.objects.pop(key, None)

    def _find(self, key: str, operation: str) -> tuple[bytes, float]:
        validate_key(key)
        with self._shelf.lock:
            found = self._shelf.objects.get(key)
        if found is None:
            raise ObjectNotFound(f"{self.url}: there is no object {key}", key=key, url=self.url, operation=operation)
        return found
