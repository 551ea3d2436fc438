"""Real gloo ranks: coordination over the process group's store, and ranks that are killed."""

from __future__ import annotations

import signal

import pytest

from tests._dist import run_ranks
from tests.publish import gloo_ranks, processes, reader
from tests.publish.sources import ArraySource, edited, flip, initial, rows, same, write_checkpoint
from tests.publish.support import open_rank, run_threads

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_gloo_ranks_publish(tmp_path):
    results = run_ranks(gloo_ranks.publish_three, 3, root=str(tmp_path))
    assert results == [results[0]] * 3
    assert results[0][:2] == [3, 3]
    assert same(reader.replay(tmp_path / "one", initial())[3], edited([1, 2, 3]))
    assert same(reader.replay(tmp_path / "two", initial())[3], edited([11, 12, 13]))


def test_ranks_publish_a_walk_over_full_tensors(tmp_path):
    base = write_checkpoint(tmp_path / "base", initial())
    shares = run_ranks(gloo_ranks.publish_a_walk, 2, root=str(tmp_path / "s"), base=str(base))
    assert sorted(shares[0] + shares[1]) == ["a.weight", "b.bias", "c.scale"]
    assert all(shares)
    states = reader.replay(tmp_path / "s", initial())
    assert [same(state, edited(range(1, version + 1))) for version, state in enumerate(states)] == [True] * 3


def test_a_subgroup_publishes(tmp_path):
    assert run_ranks(gloo_ranks.publish_on_a_subgroup, 3, root=str(tmp_path)) == [None, 1, 1]
    assert same(reader.replay(tmp_path, initial())[1], edited([1]))


def test_gloo_ranks_refuse_together(tmp_path):
    base = write_checkpoint(tmp_path / "base", initial())
    results = run_ranks(gloo_ranks.refuse_together, 2, root=str(tmp_path / "s"), base=str(base))
    assert results == [["a.weight"], ["a.weight"]]


def test_a_rank_killed_between_its_part_and_the_commit(tmp_path):
    """Rule W3, F05: all other ranks raise in the same step and name it; nothing is visible of it; a restart goes on."""
    root = tmp_path / "s"
    results, codes = processes.launch(
        processes.publish_and_kill, 4, root=str(root), point="publish.part_put", nth=2, victim=2
    )
    assert codes == [0, 0, -signal.SIGKILL, 0]
    raised = [results[rank]["raised"] for rank in (0, 1, 3)]
    assert raised[0] == raised[1] == raised[2]
    assert (raised[0]["class"], raised[0]["failures"]) == ("PublishFailed", [2])
    assert [results[rank]["version"] for rank in (0, 1, 3)] == [1, 1, 1]
    assert list((root / "parts" / f"{2:020d}").iterdir())  # its part is there, and no commit names it
    states = reader.replay(root, initial())
    assert len(states) == 2
    assert same(states[1], edited([1], flip))

    def go_on(rank, team):
        source = ArraySource(state=edited([1], flip), owned=rows(rank, 3))
        with open_rank(rank, team, root, source=source) as publisher:
            flip(source, 2)
            return publisher.publish()

    assert run_threads(3, go_on) == [2, 2, 2]
    assert same(reader.replay(root, initial())[2], edited([1, 2], flip))


@pytest.mark.parametrize(("point", "visible"), [("publish.receipts_heard", 1), ("stream.commit_written", 2)])
def test_the_coordinator_killed_before_and_after_its_commit(tmp_path, point, visible):
    # rule W3: a version is visible if and only if its commit was created, whoever dies
    results, codes = processes.launch(processes.publish_and_kill, 2, root=str(tmp_path), point=point, nth=2, victim=0)
    assert codes == [-signal.SIGKILL, 0]
    raised = results[1]["raised"]
    assert (raised["class"], raised["peer"]) == ("DeadlineExceeded", "rank 0 (coordinator)")
    states = reader.replay(tmp_path, initial())
    assert len(states) == 1 + visible
    assert same(states[visible], edited(range(1, visible + 1), flip))
