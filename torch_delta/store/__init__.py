"""Named byte objects with create-if-absent; knows nothing of versions or commits.

`base` is the interface and its promises, `local`, `memory`, `object` and `hub` are backends, `url` opens one, `calls`
repeats what is safe to repeat, `waiting` retries and polls with backoff and a deadline. Backends load on first use, so
importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.store.base import Created, ObjectInfo, Store
    from torch_delta.store.hub import HubStore
    from torch_delta.store.hub_config import HubConfig
    from torch_delta.store.local import LocalStore
    from torch_delta.store.memory import MemoryStore
    from torch_delta.store.object import ObjectStore
    from torch_delta.store.object_config import ObjectConfig
    from torch_delta.store.url import open_store
    from torch_delta.store.waiting import Backoff, poll, retry

_HOME = {
    "Backoff": "waiting",
    "Created": "base",
    "HubConfig": "hub_config",
    "HubStore": "hub",
    "LocalStore": "local",
    "MemoryStore": "memory",
    "ObjectConfig": "object_config",
    "ObjectInfo": "base",
    "ObjectStore": "object",
    "Store": "base",
    "open_store": "url",
    "poll": "waiting",
    "retry": "waiting",
}

__all__ = [
    "Backoff",
    "Created",
    "HubConfig",
    "HubStore",
    "LocalStore",
    "MemoryStore",
    "ObjectConfig",
    "ObjectInfo",
    "ObjectStore",
    "Store",
    "open_store",
    "poll",
    "retry",
]


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'torch_delta.store' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"torch_delta.store.{home}"), name)
