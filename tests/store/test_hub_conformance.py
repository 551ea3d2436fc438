"""The conformance suite over hf://buckets, with the real client and hf-xet against the local Hub."""

from __future__ import annotations

import pytest

from tests.store.hubs import raw_get, raw_put, split
from tests.stream.samples import SCHEMA, make_commit, make_info
from torch_delta.errors import Fenced
from torch_delta.store import open_store
from torch_delta.stream import Stream
from torch_delta.testing import StoreSuite


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


del StoreSuite
