"""The conformance suite over s3:// (SeaweedFS), gs:// (a local service) and az:// (Azurite), races, and a stream."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.store.servers import BUCKET, use
from tests.stream.samples import SCHEMA, make_commit, make_info
from torch_delta.errors import Fenced, ObjectExists, ObjectNotFound, StoreUnavailable
from torch_delta.format.limits import MAX_JSON_BYTES
from torch_delta.store import open_store
from torch_delta.store.object import ObjectStore
from torch_delta.store.object_config import ObjectConfig
from torch_delta.stream import Stream
from torch_delta.testing import StoreSuite
from torch_delta.testing.store_hooks import COMMIT, PART

pytestmark = pytest.mark.s3

RACER = """
import sys
from torch_delta.errors import ObjectExists
from torch_delta.format.limits import MAX_JSON_BYTES
from torch_delta.store import open_store
store, racer = open_store(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for line in sys.stdin:                    # the starting gun of each round
    key = f"commits/{int(line):020d}.json"
    try:
        store.put_new(key, (racer * 50_000).encode())
        print("won", flush=True)
    except ObjectExists:
        print("lost", flush=True)
"""


class ObjectStoreSuite(StoreSuite):
    @pytest.fixture
    def server(self):
        raise NotImplementedError

    @pytest.fixture
    def store(self, server, monkeypatch):
        use(monkeypatch, server.environment)
        self.server = server
        with open_store(server.fresh_url()) as store:
            yield store

    def raw_put(self, store, key, data):
        self.server.raw_put(store.url, key, data)

    def raw_get(self, store, key):
        return self.server.raw_get(store.url, key)

    def test_of_many_processes_exactly_one_creates(self, store) -> None:
        num_processes = 4
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACER, store.url, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for number in range(num_processes)
        ]
        try:
            assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * num_processes
            for version in range(10):
                for racer in racers:
                    racer.stdin.write(f"{version}\n")
                    racer.stdin.flush()
                outcomes = [racer.stdout.readline().strip() for racer in racers]
                assert sorted(outcomes) == ["lost"] * (num_processes - 1) + ["won"], outcomes
                stored = self.raw_get(store, f"commits/{version:020d}.json")
                assert stored == str(outcomes.index("won")).encode() * 50_000
        finally:
            for racer in racers:
                racer.stdin.close()
                racer.stdout.close()
                racer.wait(60)
        assert [racer.returncode for racer in racers] == [0] * num_processes

    def test_ranges_above_a_chunk_are_exact(self, store) -> None:
        content = bytes(range(256)) * (17 << 12)  # 17 MiB: three chunks
        self.raw_put(store, "parts/x.safetensors", content)
        assert store.get("parts/x.safetensors") == content
        assert store.get_range("parts/x.safetensors", 3, (17 << 20) - 5) == content[3:-2]
        assert store.get("parts/x.safetensors", max_bytes=17 << 20) == content

    def test_a_large_object_beside_an_existing_one_is_refused_before_it_is_sent(self, store) -> None:
        self.raw_put(store, PART, b"first")
        sent = []

        def pieces():
            for number in range(100):
                sent.append(number)
                yield bytes(1 << 20)

        with pytest.raises(ObjectExists):
            store.put_new(PART, pieces())
        assert len(sent) <= 9  # one chunk, to know that it is large
        assert self.raw_get(store, PART) == b"first"

    def test_a_large_tuple_is_streamed_too(self, store, server) -> None:
        config = ObjectConfig(single_put_bytes=8 << 20)
        with ObjectStore(store.url, config=config) as small:
            block = bytes(range(256))
            pieces = (block * (5 << 12), block * (6 << 12))
            assert small.put_new(PART, pieces).size_bytes == 11 << 20
        assert self.raw_get(store, PART) == b"".join(pieces)

    def test_what_cannot_be_created_exclusively_needs_a_name_of_its_own(self, store) -> None:
        # rule K5: only names that hold a nonce go into multipart uploads and copies, which have no precondition
        sent = []

        def pieces():
            for number in range(100):
                sent.append(number)
                yield bytes(1 << 20)

        self.raw_put(store, PART, b"source")
        with ObjectStore(store.url, config=ObjectConfig(single_put_bytes=8 << 20)) as small:
            for call in (
                lambda: small.put_new(COMMIT, pieces()),
                lambda: small.put_new(COMMIT, bytes((8 << 20) + 1)),
                lambda: small.put_new("stream.json", (bytes(8 << 20), b"x")),
                lambda: small.copy(PART, COMMIT),
            ):
                with pytest.raises(ValueError, match="must hold a nonce of 16 hex digits"):
                    call()
            assert len(sent) <= 9
            assert [info.key for info in small.list()] == [PART]
            small.put_new(COMMIT, bytes(8 << 20))

    def test_as_large_as_a_commit_can_be_it_is_created_by_one_racer(self, store) -> None:
        assert ObjectConfig().single_put_bytes >= MAX_JSON_BYTES
        size_bytes = 12 << 20  # more than a chunk, what an iterable of bytes would have to be streamed for
        contents = [bytes([racer]) * size_bytes for racer in range(3)]
        self.num_racers = len(contents)
        outcomes = self.race(lambda racer: store.put_new(COMMIT, contents[racer]))
        winners = [racer for racer, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
        assert len(winners) == 1, outcomes
        assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [ObjectExists] * 2
        assert self.raw_get(store, COMMIT) == contents[winners[0]]

    @pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt])
    def test_a_source_that_fails_in_the_middle_of_an_upload_leaves_nothing(self, store, error) -> None:
        def pieces():
            for _ in range(20):
                yield bytes(1 << 20)
            raise error("from the source")

        with pytest.raises(error, match="from the source"):
            store.put_new(PART, pieces())
        assert self.raw_get(store, PART) is None
        assert [*store.list()] == []

    def test_a_missing_bucket_is_never_an_empty_store(self, store) -> None:  # F78
        for call in (
            lambda lost: lost.get("head.json"),
            lambda lost: lost.stat("head.json"),
            lambda lost: lost.get_range("head.json", 0, 1),
            lambda lost: [*lost.list()],
            lambda lost: [*lost.list("commits/")],
        ):
            with open_store(store.url.replace(BUCKET, "no-such-bucket")) as lost:
                with pytest.raises(StoreUnavailable, match=r"no such bucket: create it") as caught:
                    call(lost)
                assert caught.value.facts["peer"] == lost.url

    def test_a_closed_store_says_so(self, store) -> None:
        store.close()
        for call in (lambda: store.get("x"), lambda: store.put_new("x", b""), lambda: [*store.list()]):
            with pytest.raises(StoreUnavailable, match="closed") as caught:
                call()
            assert caught.value.facts["outcome"] == "absent"

    def test_a_stream_is_written_and_read(self, store) -> None:
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
        with pytest.raises(ObjectNotFound):
            store.get("commits/00000000000000000004.json")


class TestS3(ObjectStoreSuite):
    @pytest.fixture
    def server(self, seaweed):
        return seaweed


class TestGcs(ObjectStoreSuite):
    @pytest.fixture
    def server(self, gcs):
        return gcs

    def test_the_cloud_is_asked_to_start_after_a_key(self, store) -> None:
        keys = [f"commits/{number:020d}.json" for number in range(5)]
        for key in keys:
            self.raw_put(store, key, b"x")
        store._starts_after = True  # as without a custom endpoint
        for number in range(5):
            listed = [info.key for info in store.list("commits/", start_after=keys[number])]
            assert listed == keys[number + 1 :]
        assert [info.key for info in store.list(start_after="commits/")] == keys


class TestAzure(ObjectStoreSuite):
    @pytest.fixture
    def server(self, azure):
        return azure


del StoreSuite, ObjectStoreSuite  # neither is to be collected by itself
