"""The in-memory store: the conformance suite, and what its name means."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

from torch_delta.errors import ObjectNotFound
from torch_delta.store import MemoryStore, open_store
from torch_delta.testing import StoreSuite

_names = itertools.count()


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store

    def raw_put(self, store, key, data):
        store._shelf.objects[key] = (data, 0.0)

    def raw_get(self, store, key):
        found = store._shelf.objects.get(key)
        return None if found is None else found[0]


def test_stores_of_one_name_share_their_objects() -> None:
    name = f"shared/run-{next(_names)}"
    open_store(f"memory://{name}").put_new("head.json", b"x")
    assert open_store(f"memory://{name}").get("head.json") == b"x"
    with pytest.raises(ObjectNotFound):
        open_store(f"memory://{name}-other").get("head.json")


def test_an_unnamed_store_goes_with_its_instance() -> None:
    store = MemoryStore()
    store.put_new("head.json", b"x")
    shelf = weakref.ref(store._shelf)
    del store
    gc.collect()
    assert shelf() is None
