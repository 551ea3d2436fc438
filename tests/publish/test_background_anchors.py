"""Anchors while training goes on: at the right version on every rank, by policy, and never at training's expense."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, SteppedSource, edit, edited, flip, initial, rows, same, write_checkpoint
from tests.publish.support import config, open_rank, run_threads
from tests.publish.test_anchors import TABLE, only_anchor
from torch_delta import crashpoints
from torch_delta.config import PublishConfig, RetentionConfig
from torch_delta.errors import PublishFailed, StoreUnavailable
from torch_delta.publish import attach_source, snapshot
from torch_delta.publish.base import open_base
from torch_delta.publish.cadence import Cadence
from torch_delta.publish.records import Committed
from torch_delta.receive import Follower, LocalCheckpoint, pull
from torch_delta.store.local import LocalStore
from torch_delta.stream import Stream
from torch_delta.testing.faults import Fault, FaultyStore, call, fail_before

PATIENCE_S = 20


@pytest.fixture
def base(tmp_path):
    return write_checkpoint(tmp_path / "base", initial())


def anchor_versions(root) -> list[int]:
    return sorted(int(path.name[:20]) for path in (root / "anchors").glob("*.json"))


@pytest.mark.parametrize("in_memory_bytes", [1 << 20, 0])
def test_training_and_publishing_go_on_while_an_anchor_is_uploaded(
    tmp_path, base, monkeypatch, in_memory_bytes
) -> None:
    monkeypatch.setattr(snapshot, "_IN_MEMORY_BYTES", in_memory_bytes)
    is_let = threading.Event()
    store = FaultyStore(
        LocalStore(tmp_path / "s"), [Fault("put_new", "anchors/*", effect=call(lambda: is_let.wait(PATIENCE_S)))]
    )
    source = SteppedSource()
    with attach_source(
        source, store, base=base, config=config(anchor_every=2, anchor_spool_dir=str(tmp_path))
    ) as publisher:
        for seed in range(1, 6):
            edit(source, seed)
            source.step()
        publisher.wait(5)
        assert anchor_versions(tmp_path / "s") == [], "none of the five versions waited for it"
        is_let.set()
    store.assert_fired()
    assert [report.version for report in publisher.anchors] == [2, 4]
    assert all(report.snapshot_s > 0 for report in publisher.anchors)
    for version in (2, 4):
        assert same(only_anchor(tmp_path / "s", version)[1], edited(range(1, version + 1)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "s"], "nothing is left of the copies"


def test_the_adaptive_policy_is_the_same_on_all_ranks(tmp_path, base) -> None:
    # F104: replaying the chain would cost more than the anchor
    cost = {"receiver_bytes_per_s": 1e9, "receiver_elements_per_s": 10.0, "anchor_least_s": 1.5, "anchor_share": 1.0}

    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 3))
        with open_rank(rank, team, tmp_path / "s", source=source, base=open_base(base), **cost) as publisher:
            for seed in range(1, 9):
                edit(source, seed)  # at least 7 elements
                publisher.publish()
        return [report.version for report in publisher.anchors]

    ranks = run_threads(3, rank_main)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0]
    assert ranks[0][0] >= 3, "due at version 1 at the earliest, taken part in two versions later"
    for version in ranks[0]:
        assert same(only_anchor(tmp_path / "s", version)[1], edited(range(1, version + 1)))


def committed(version: int, num_changed: int, stored_bytes: int) -> Committed:
    return Committed(
        version=version, num_changed=num_changed, stored_bytes=stored_bytes, num_parts=1, receipts_s=0.0, commit_s=0.0
    )


def test_when_an_anchor_is_due() -> None:
    chosen = PublishConfig(
        receiver_bytes_per_s=100.0, receiver_elements_per_s=10.0, anchor_least_s=0.0, anchor_share=0.5
    )
    cadence = Cadence(chosen, full_bytes=4000)  # 40 s, so 20 s of deltas
    assert not cadence.note(committed(1, 100, 900))  # 10 s + 9 s
    assert cadence.note(committed(2, 10, 1))
    assert not cadence.note(committed(3, 1000, 1)), "asked for once"
    cadence.failed()
    assert cadence.note(committed(4, 0, 0))
    cadence.written(2)
    assert cadence.note(committed(5, 0, 0)), "version 3 alone costs 100 s"
    cadence.written(5)
    assert not cadence.note(committed(6, 0, 0))
    assert not Cadence(PublishConfig(anchor_share=None), 1).note(committed(1, 10**12, 10**15))
    assert not Cadence(PublishConfig(), 1).note(committed(1, 100, 10**8)), "half a second is not worth one"


def test_an_anchor_on_request_belongs_to_the_next_version(tmp_path, base) -> None:
    source = ArraySource()
    with attach_source(source, str(tmp_path / "s"), base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
        publisher.request_anchor()
        for seed in (2, 3):
            edit(source, seed)
            publisher.publish()
    assert anchor_versions(tmp_path / "s") == [2]
    assert same(only_anchor(tmp_path / "s", 2)[1], edited([1, 2]))


def test_a_version_that_fails_has_no_anchor_and_the_next_one_has(tmp_path, base) -> None:
    def rank_main(rank, team):
        faults = [Fault("put_new", "parts/*/00001-*", nth=n, effect=fail_before()) for n in (1, 2, 3)] if rank else []
        store = FaultyStore(LocalStore(tmp_path / "s"), faults)
        source = ArraySource(owned=rows(rank, 2))
        with open_rank(rank, team, None, source=source, store=store, base=open_base(base)) as publisher:
            publisher.request_anchor()
            flip(source, 1)
            publisher.publish()
            with pytest.raises(PublishFailed):
                publisher.wait()
            flip(source, 2)
            assert publisher.publish() == 1
            flip(source, 3)
            publisher.publish()
        return [report.version for report in publisher.anchors]

    assert run_threads(2, rank_main) == [[1], [1]]
    assert same(only_anchor(tmp_path / "s", 1)[1], edited([1, 2], flip))


def test_a_rank_without_room_for_its_copy_costs_the_anchor_and_nothing_else(tmp_path, base, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_IN_MEMORY_BYTES", 0)

    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 2))
        where = str(tmp_path / ("nowhere" if rank else "."))
        with open_rank(
            rank, team, tmp_path / "s", source=source, base=open_base(base), anchor_every=1, anchor_spool_dir=where
        ) as publisher:
            flip(source, 1)
            publisher.publish()
            publisher.wait()
            with pytest.raises(StoreUnavailable, match="anchor_spool_dir"):
                publisher.anchor()
        return publisher.anchors

    assert run_threads(2, rank_main) == [(), ()]
    assert anchor_versions(tmp_path / "s") == []


def test_a_store_that_fails_an_anchor_gets_the_next_one(tmp_path, base) -> None:
    store = FaultyStore(LocalStore(tmp_path / "s"), [Fault("put_new", "anchors/*", effect=fail_before())])
    source = ArraySource()
    with attach_source(source, store, base=base, config=config(anchor_every=1)) as publisher:
        for seed in (1, 2):
            edit(source, seed)
            publisher.publish()
            publisher.wait()
    store.assert_fired()
    assert anchor_versions(tmp_path / "s") == [2]


def test_the_publisher_makes_room_after_anchors(tmp_path, base) -> None:
    # rules L1 and A6; F85, F88: a delete that fails stops nobody
    inner = LocalStore(tmp_path / "s")
    store = FaultyStore(inner, [Fault("delete", "commits/*", effect=fail_before())])
    source = ArraySource()
    with attach_source(
        source, store, base=base, config=config(anchor_every=2, retention=RetentionConfig())
    ) as publisher:
        for seed in range(1, 9):
            edit(source, seed)
            publisher.publish()
            publisher.wait()
    store.assert_fired()
    assert anchor_versions(tmp_path / "s") == [6, 8]
    assert sorted(int(path.stem) for path in (tmp_path / "s" / "commits").iterdir()) == [6, 7, 8]
    assert sorted(int(path.name) for path in (tmp_path / "s" / "parts").iterdir() if any(path.iterdir())) == [6, 7, 8]
    assert publisher.retention is not None
    assert publisher.retention.floor == 6


KILLED = """
import sys
from pathlib import Path
from tests.publish.sources import ArraySource, edit
from tests.publish.support import config
from torch_delta.config import RetentionConfig
from torch_delta.publish import attach_source
root = Path(sys.argv[1])
source = ArraySource()
settings = config(anchor_every=1, retention=RetentionConfig(), anchor_file_bytes=1)
with attach_source(source, str(root / "s"), base=root / "base", config=settings) as publisher:
    for seed in (1, 2, 3, 4):
        edit(source, seed)
        publisher.publish()
        publisher.wait()
        while len(publisher.anchors) < seed:
            pass
"""


@pytest.mark.parametrize(
    ("crash", "num_anchors"),
    [
        ("publish.anchor_staged:2", 1),
        ("publish.anchor_file_put:2", 0),
        ("publish.anchor_manifest_put:2", 2),
        ("gc.claimed:3", 3),
        ("gc.commit_deleted:1", 3),
        ("gc.part_deleted:1", 3),
        ("gc.manifest_deleted:1", 2),
        ("gc.file_deleted:1", 2),
    ],
)
def test_killed_while_an_anchor_is_written_or_room_is_made(tmp_path, base, crash: str, num_anchors: int) -> None:
    # rules A1, K6, W3: what was committed can be read, an anchor that is not whole does not exist, a restart goes on
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, crashpoints.ENVIRONMENT: f"{crash}:kill", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == -9, run.stderr
    root = tmp_path / "s"
    assert len(anchor_versions(root)) == num_anchors
    version = Stream(LocalStore(root)).head()
    newest = max(anchor_versions(root), default=0)
    assert newest <= version <= newest + 1, "training does not wait for anchors"
    place = tmp_path / "place"
    with pull(str(root), place, base=base) as checkpoint, checkpoint.reading() as folder:
        assert same(reader.folder(folder, TABLE), edited(range(1, version + 1)))
    for claim in (root / "claims").glob("*"):
        os.utime(claim, (1, 1))
    source = ArraySource(state=edited(range(1, version + 1)))
    settings = config(retention=RetentionConfig(grace_s=0))
    with attach_source(source, str(root), base=base, config=settings) as publisher:
        assert publisher.version == version
        for seed in (8, 9):
            edit(source, seed)
            publisher.publish()
            publisher.anchor()
    assert anchor_versions(root) == [version + 1, version + 2]
    assert sorted(int(path.stem) for path in (root / "commits").iterdir()) == [version + 1, version + 2]
    with pull(str(root), place) as checkpoint, checkpoint.reading() as folder:
        assert same(reader.folder(folder, TABLE), edited([*range(1, version + 1), 8, 9]))


@pytest.mark.parametrize(("wanted", "num_anchors"), [(None, 0), (True, 1), (False, 0)])
def test_the_first_anchor_by_policy(tmp_path, base, wanted: bool | None, num_anchors: int) -> None:
    # F103: what receivers start from is explicit; beside the base, on a disk, they have it
    for world in (2, 1):  # attached a second time: there is one already

        def rank_main(rank, team):
            source = ArraySource(owned=rows(rank, team.world_size))
            with open_rank(rank, team, tmp_path / "run", source=source, base=open_base(base), anchor_first=wanted):
                pass

        run_threads(world, rank_main)
        assert len(list((tmp_path / "run" / "anchors").glob("*.json"))) == num_anchors


class Bucket(LocalStore):
    """A folder that says it is far away."""

    @property
    def url(self) -> str:
        return "s3://bucket/run"


def test_where_receivers_cannot_have_the_base_the_stream_begins_with_an_anchor(tmp_path, base) -> None:
    store = Bucket(tmp_path / "run")
    with attach_source(ArraySource(), store, base=base, config=config()) as publisher:
        edit(publisher._source, 1)
        publisher.publish()
        publisher.wait()
        publisher.close()
        assert [report.version for report in publisher.anchors] == [0]
    checkpoint = LocalCheckpoint(tmp_path / "place")  # nobody gave it a base
    with Follower(Bucket(tmp_path / "run")) as follower:
        assert [r.kind for r in follower.apply_to(checkpoint, until="head", timeout_s=20)] == ["anchor", "delta"]
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, TABLE), edited([1]))
