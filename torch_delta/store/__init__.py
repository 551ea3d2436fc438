"""Named byte objects with create-if-absent; knows nothing of versions or commits.

`base` is the interface and its promises, `local` and `memory` are backends, `url` opens one, `waiting` retries and
polls with backoff and a deadline. Backends load on first use, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.store.base import Created, ObjectInfo, Store
    from torch_delta.store.local import LocalStore
    from torch_delta.store.memory import MemoryStore
    from torch_delta.store.url import open_store
    from torch_delta.store.waiting import Backoff, poll, retry

_HOME = {
    "Backoff": "waiting",
    "Created": "base",
    "LocalStore": "local",
    "MemoryStore": "memory",
    "ObjectInfo": "base",
    "Store": "base",
    "open_store": "url",
    "poll": "waiting",
    "retry": "waiting",
}

__all__ = ["Backoff", "Created", "LocalStore", "MemoryStore", "ObjectInfo", "Store", "open_store", "poll", "retry"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'torch_delta.store' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"torch_delta.store.{home}"), name)
