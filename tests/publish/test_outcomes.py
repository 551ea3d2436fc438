"""What the coordinator does when it is the odd one out: telling fails, the stream is not what it was, keys are left."""

from __future__ import annotations

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, edit, edited, flip, initial, rows, same, write_checkpoint
from tests.publish.support import config, open_rank, run_threads
from torch_delta.errors import DeadlineExceeded, PublishFailed
from torch_delta.publish import attach_source
from torch_delta.publish.base import open_base
from torch_delta.publish.coordination import Team
from torch_delta.publish.keyvalue import LocalKeyValue
from torch_delta.store.local import LocalStore
from torch_delta.testing.faults import Fault, FaultyStore, fail_before


class Flaky(LocalKeyValue):
    """Does not answer the first `times` outcomes."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def set(self, key, value) -> None:
        if key.startswith("outcome/") and self.left:
            self.left -= 1
            raise DeadlineExceeded("scripted", phase="key-value store", peer="server", timeout_s=0.0)
        super().set(key, value)


def test_a_version_that_exists_is_never_told_as_failed(tmp_path) -> None:
    base = open_base(write_checkpoint(tmp_path / "base", initial()))
    kv = Flaky(1)
    source = ArraySource()
    with open_rank(0, Team(0, 1, kv), tmp_path / "s", source=source, base=base) as publisher:
        edit(source, 1)
        publisher.publish()
        with pytest.raises(DeadlineExceeded):
            publisher.wait(timeout_s=1.0)
        edit(source, 2)
        publisher.publish()
        publisher.wait(2)
        assert [report.version for report in publisher.reports] == [1, 2]
    assert kv.left == 0
    assert same(reader.replay(tmp_path / "s", initial())[2], edited([1, 2]))


def test_a_commit_that_cannot_follow_is_given_up_and_not_kept_for_ever(tmp_path) -> None:
    source = ArraySource()
    base = write_checkpoint(tmp_path / "base", initial())
    with attach_source(source, str(tmp_path / "s"), base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
        publisher.wait()
        lineage = publisher._committer.lineage
        good, lineage.parent_sha256 = lineage.parent_sha256, "0" * 64
        edit(source, 2)
        publisher.publish()
        with pytest.raises(PublishFailed, match="forks from another history"):
            publisher.wait()
        lineage.parent_sha256 = good
        publisher.publish()
        publisher.wait()
    assert same(reader.replay(tmp_path / "s", initial())[2], edited([1, 2]))


def test_nothing_of_aborted_versions_stays_in_the_shared_map(tmp_path) -> None:
    base = write_checkpoint(tmp_path / "base", initial())
    maps = []

    def rank_main(rank, team):
        maps.append(team.kv)
        faults = [Fault("put_new", "parts/*/00001-*", nth=n, effect=fail_before()) for n in (1, 2, 3)] if rank else []
        store = FaultyStore(LocalStore(tmp_path / "s"), faults)
        source = ArraySource(owned=rows(rank, 2))
        with open_rank(rank, team, None, source=source, store=store, base=open_base(base)) as publisher:
            flip(source, 1)
            publisher.publish()
            flip(source, 2)
            publisher.publish()
            with pytest.raises(PublishFailed):
                publisher.wait()
            for seed in (3, 4):
                flip(source, seed)
                publisher.publish()
                publisher.wait()

    run_threads(2, rank_main)
    assert [key for key in maps[0]._values if key.startswith("receipt/")] == []
