"""The life of a stream on each kind of remote store: anchors, a late joiner, room made, a restart, and going over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, edit, edited, initial, same, write_checkpoint
from tests.publish.support import config
from tests.publish.test_anchors import TABLE
from tests.store.chaos_proxy import ChaosProxy, Fault, http_error
from tests.store.servers import use
from torch_delta.config import RetentionConfig
from torch_delta.errors import ObjectNotFound
from torch_delta.publish import attach_source
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store import open_store, poll
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage
from torch_delta.stream.forks import note_fork
from torch_delta.testing.faults import FaultyStore

pytestmark = pytest.mark.s3

SEEDS = [1, 2, 3]


@pytest.fixture(params=["seaweed", "gcs", "azure", "hub"])
def url(request, monkeypatch) -> str:
    if request.param == "hub":
        return request.getfixturevalue("hub_url")
    server = request.getfixturevalue(request.param)
    use(monkeypatch, server.environment)
    return server.fresh_url()


def follow(url: str, checkpoint: LocalCheckpoint, expected, **options) -> list[str]:
    with Follower(url, **options) as follower:
        kinds = [report.kind for report in follower.apply_to(checkpoint, until="head", timeout_s=60)]
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, TABLE), expected)
    return kinds


def test_a_stream_lives_on_a_remote_store(url, tmp_path) -> None:
    # F85, F86, F98, F103
    base = write_checkpoint(tmp_path / "base", initial())
    chosen = config(commit_timeout_s=60.0, wait_timeout_s=120.0, receipt_timeout_s=60.0, anchor_file_bytes=1)
    source = ArraySource()
    with attach_source(source, url, base=base, config=chosen) as publisher:
        for seed in SEEDS:
            edit(source, seed)
            publisher.publish()
            publisher.wait()
            if seed == 2:
                publisher.anchor()
        again = [publisher.anchor(), publisher.anchor()]  # of one state: only the manifest of the second is new
    assert [report.version for report in publisher.anchors] == [0, 2, 3, 3]  # 0: receivers elsewhere lack the base
    assert again[1].copied_bytes == again[1].stored_bytes > 0

    early = LocalCheckpoint(tmp_path / "early")
    assert follow(url, early, edited(SEEDS), lease_s=600) == ["anchor"]
    with open_store(url) as store:
        report = collect_garbage(Stream(store), RetentionConfig(grace_s=0.0))
        assert (report.floor, report.versions, report.anchors, report.failures) == (2, (1,), (0,), ())
        counting = FaultyStore(store)
        assert Stream(counting).head(3) == 3
        assert sum(counting.calls.values()) - counting.calls["get"] == 1, "waiting costs one small request"
    assert follow(url, LocalCheckpoint(tmp_path / "late"), edited(SEEDS)) == ["anchor"]

    with attach_source(ArraySource(state=edited([1, 2])), url, base=base, config=chosen) as publisher:
        edit(publisher._source, 9)
        publisher.publish()
        publisher.wait()
    assert follow(url, early, edited([1, 2, 9])) == ["anchor", "delta"]
    with open_store(url) as store:
        successor = Stream(store).successor()
        assert successor is not None
        assert successor.version == 2
        with store.sibling(successor.root) as sibling:
            assert Stream(sibling).head() == 1
            assert [*store.list("forks/")] == [], "the note of a fork goes when it is finished"
            # rule L6: one that is never finished is found and deleted, and the finished one is not
            note = note_fork(Stream(store), "nested-0a1b2c3d", "f" * 32)
            with store.sibling(note.root) as beside:
                beside.put_new(f"anchors/{0:020d}-{'a' * 16}/model.safetensors", iter([b"begun"]))

                def sweep() -> tuple[str, ...] | None:  # some stores tell times in whole seconds
                    return collect_garbage(Stream(store), RetentionConfig(grace_s=0.0)).forks or None

                assert poll(sweep, phase="the fork is old", peer=url, timeout_s=30) == (note.root,)
                assert [*beside.list(), *store.list("forks/")] == []
            assert Stream(sibling).head() == 1


@pytest.fixture(params=["gcs", "azure"])
def proxied(request, monkeypatch, tmp_path):
    """A server behind a proxy: its raw side, the proxy, and a store that goes through it."""
    server = request.getfixturevalue(request.param)
    with ChaosProxy(("127.0.0.1", server.port)) as proxy:
        environment = {}
        for name, value in server.environment.items():
            if name == "GOOGLE_SERVICE_ACCOUNT":
                text = Path(value).read_text()
                (tmp_path / "account.json").write_text(text.replace(str(server.port), str(proxy.port)))
                environment[name] = os.fspath(tmp_path / "account.json")
            else:
                environment[name] = value.replace(f":{server.port}", f":{proxy.port}")
        use(monkeypatch, environment)
        with open_store(server.fresh_url()) as store:
            yield server, proxy, store


COMMIT = "commits/00000000000000000001.json"
PART = "parts/00000000000000000001/00000-0000-0123456789abcdef.safetensors"
BIG = bytes(range(256)) * (20 << 12)  # 20 MiB: three chunks


@pytest.mark.parametrize(
    "script",
    [
        [Fault("reset", num_times=2)],
        [Fault("swallow", b"PUT ")],
        [Fault("swallow", b"HEAD "), Fault("swallow", b"PUT ")],
        [Fault("cut up", b"PUT ", num_times=2, after_bytes=100_000)],
        [Fault("cut down", b"GET ", num_times=2, after_bytes=100_000)],
        [Fault("answer", b"PUT ", num_times=2, answer=http_error(503, "ServerBusy"))],
        [Fault("answer", b"GET ", num_times=2, answer=http_error(429, "TooManyRequests"))],
        [Fault("answer", b"PUT ", num_times=1, answer=http_error(500, "InternalError"))],
    ],
    ids=["reset", "lost reply", "lost twice", "cut up", "cut down", "503", "429", "500"],
)
def test_faults_on_the_way_change_nothing(proxied, script) -> None:
    server, proxy, store = proxied
    faults = [proxy.add(Fault(f.kind, f.match, f.num_times, f.after_bytes, f.answer)) for f in script]
    content = BIG[: 1 << 20]
    store.put_new(COMMIT, content)
    store.put_new(PART, iter([BIG[: 10 << 20], BIG[10 << 20 :]]))
    copied = store.copy(PART, PART.replace("0123456789abcdef", "fedcba9876543210"))
    assert copied is not None
    assert server.raw_get(store.url, COMMIT) == content
    assert server.raw_get(store.url, PART) == server.raw_get(store.url, copied.key) == BIG
    assert store.get(PART) == BIG
    assert [info.key for info in store.list()] == sorted([COMMIT, PART, copied.key])
    with pytest.raises(ObjectNotFound):
        store.stat("commits/00000000000000000002.json")
    assert [fault.num_fired for fault in faults] == [fault.num_times for fault in faults]
