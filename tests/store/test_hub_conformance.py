"""The conformance suite over hf://buckets, with the real client and hf-xet against the local Hub."""

from __future__ import annotations

import pytest

from tests.store.hubs import raw_get, raw_put, split
from tests.stream.samples import SCHEMA, make_commit, make_info
from torch_delta.errors import Fenced
from torch_delta.format.limits import MAX_JSON_BYTES
from torch_delta.store import open_store
from torch_delta.store.hub import HubStore
from torch_delta.store.hub_config import HubConfig
from torch_delta.stream import Stream
from torch_delta.testing import StoreSuite
from torch_delta.testing.store_hooks import COMMIT, PART


class TestHub(StoreSuite):
    @pytest.fixture
    def store(self, hub, hub_url):
        self.hub = hub
        with open_store(hub_url) as store:
            yield store

    def raw_put(self, store, key, data):
        raw_put(self.hub, store.url, key, data)

    def raw_get(self, store, key):
        return raw_get(self.hub, store.url, key)

    def test_a_stream_is_written_and_read_and_fences_a_second_writer(self, store) -> None:
        writer = Stream(store)
        writer.create(make_info(), SCHEMA)
        sha256s = []
        for version in (1, 2, 3):
            parent = writer.info_sha256 if version == 1 else sha256s[-1]
            sha256s.append(writer.write_commit(make_commit(version, parent)))
            writer.write_head(version, sha256s[-1])
        with open_store(store.url) as other:
            reader = Stream(other)
            reader.load()
            assert reader.head() == 3
            assert [found.sha256 for found in reader.commits(1, 3)] == sha256s
            with pytest.raises(Fenced):
                reader.write_commit(make_commit(3, sha256s[1], nonce="theirs"))
        assert not any(".claims" in path for path in self.hub.buckets[split(store.url)[0]])

    def test_a_poll_is_one_request(self, store) -> None:
        raw_put(self.hub, store.url, "head.json", b"x")
        self.hub.requests.clear()
        store.stat("head.json")
        store.get("head.json")
        assert [line.partition(" ")[0] for line in self.hub.requests] == ["POST", "GET"]

    def test_what_cannot_be_created_exclusively_needs_a_name_of_its_own(self, hub, store) -> None:
        # rule K5
        assert HubConfig().exclusive_bytes >= MAX_JSON_BYTES, "every commit is exclusive"
        raw_put(hub, store.url, PART, b"source")
        with HubStore(store.url, config=HubConfig(exclusive_bytes=1000)) as small:
            for call in (
                lambda: small.put_new(COMMIT, iter([b"x"])),
                lambda: small.put_new(COMMIT, bytes(1001)),
                lambda: small.copy(PART, COMMIT),
            ):
                with pytest.raises(ValueError, match="must hold a nonce of 16 hex digits"):
                    call()
            assert [info.key for info in small.list()] == [PART]
            small.put_new(COMMIT, bytes(1000))


del StoreSuite
