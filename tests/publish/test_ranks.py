"""Several ranks as threads: one commit from all parts, and one error on all ranks in the same step."""

from __future__ import annotations

import threading
import time

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, SteppedSource, edit, edited, flip, initial, rows, same
from tests.publish.support import open_rank, run_threads
from torch_delta.capture.source import OwnedBox
from torch_delta.errors import CaptureError, Fenced, PublishFailed, StoreUnavailable
from torch_delta.format.box import Box
from torch_delta.publish.coordination import Team
from torch_delta.publish.keyvalue import LocalKeyValue
from torch_delta.store.local import LocalStore
from torch_delta.testing.faults import Fault, FaultyStore, call, fail_before

WORLD = 3


def test_all_ranks_parts_make_one_version(tmp_path):
    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, WORLD))
        with open_rank(rank, team, tmp_path, source=source) as publisher:
            for seed in (1, 2, 3):
                edit(source, seed)
                publisher.publish()
            return publisher.wait()

    reports = run_threads(WORLD, rank_main)
    assert {(r.version, r.num_changed, r.stored_bytes, r.num_parts) for r in reports} == {
        (3, reports[0].num_changed, reports[0].stored_bytes, reports[0].num_parts)
    }
    states = reader.replay(tmp_path, initial())
    assert len(states) == 4
    for version in (1, 2, 3):
        assert same(states[version], edited(range(1, version + 1)))
    commit = reader.sealed(tmp_path / "commits" / f"{1:020d}.json")
    assert len({part["rank"] for part in commit["parts"]}) > 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_is_raised_on_all_in_the_same_step(tmp_path, failing):
    """Ranks in lock-step, as collectives keep them: nobody may run into the next step's collective alone.

    The abort is written at the worst moment: rank 0 has not counted the step that rank 1 has already finished.
    """
    barrier = threading.Barrier(WORLD)
    aborting, ahead = threading.Event(), threading.Event()

    class WorstMoment(LocalKeyValue):
        def set(self, key, value):
            if key == "outcome/0":
                aborting.set()
                assert ahead.wait(20)
            super().set(key, value)

    kv = WorstMoment()

    def rank_main(rank, _team):
        faults = [Fault("put_new", "parts/*", nth=1, effect=fail_before())] if rank == failing else []
        source = SteppedSource(owned=rows(rank, WORLD))
        store = FaultyStore(LocalStore(tmp_path), faults)
        raised = []
        publisher = open_rank(
            rank, Team(rank, WORLD, kv), tmp_path, source=source, store=store, num_put_attempts=1, max_in_flight=100
        )
        with publisher:
            while len(raised) == 0 or source.num_steps < raised[0][0] + 3:
                if source.num_steps == 2:
                    assert aborting.wait(20)  # rank 0 holds its clock at 2, or at 1 on its way there
                flip(source, source.num_steps)
                try:
                    source.step()
                except PublishFailed as error:
                    raised.append((source.num_steps, error.version, sorted(error.failures)))
                if (rank, source.num_steps) == (1, 3):
                    ahead.set()
                barrier.wait(30)  # the next forward needs every rank
            publisher.wait()
        store.assert_fired()
        return raised, source.live

    results = run_threads(WORLD, rank_main)
    assert [raised for raised, _ in results] == [[(4, 1, [failing])]] * WORLD
    assert same(reader.replay(tmp_path, initial())[-1], results[0][1])


def test_without_steps_all_ranks_raise_in_the_same_publish(tmp_path):
    """Nothing keeps ranks together here; the call that needs the outcome raises, on every rank the same one.

    Version 3 fails after ranks 0 and 1 have published 4, and before rank 2 has.
    """
    behind, failed = threading.Barrier(2), threading.Event()

    def fail_late():
        assert failed.wait(20)
        raise StoreUnavailable("down", outcome="absent")

    def rank_main(rank, team):
        faults = [Fault("put_new", "parts/*", nth=3, effect=call(fail_late))] if rank == 1 else []
        source = ArraySource(owned=rows(rank, WORLD))
        store = FaultyStore(LocalStore(tmp_path), faults)
        calls = []
        with open_rank(
            rank, team, tmp_path, source=source, store=store, num_put_attempts=1, max_in_flight=2
        ) as publisher:
            for number in range(1, 13):
                flip(source, number)
                if (rank, number) == (2, 4):
                    while publisher._failure is None:
                        publisher._hear()
                try:
                    calls.append(publisher.publish())
                except PublishFailed as error:
                    calls.append(f"version {error.version} failed on {sorted(error.failures)}")
                if rank < 2 and number == 4:
                    behind.wait(20)
                    failed.set()
        return calls, source.live

    results = run_threads(WORLD, rank_main)
    # 3 fails; 4 was in flight behind it; the call that would be 5 needs to know, and raises
    assert [calls for calls, _ in results] == [[1, 2, 3, 4, "version 3 failed on [1]", 3, 4, 5, 6, 7, 8, 9]] * WORLD
    states = reader.replay(tmp_path, initial())
    assert len(states) == 10
    assert same(states[-1], results[0][1])


def test_a_missing_receipt_names_the_rank(tmp_path):
    # rule W3, F32: the wait has a deadline and names the peer
    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, WORLD))
        publisher = open_rank(rank, team, tmp_path, source=source, receipt_timeout_s=4.0)
        edit(source, 1)
        if rank != 1:
            publisher.publish()
            with pytest.raises(PublishFailed, match=r"rank 1: no receipt for version 1 within 4 s") as caught:
                publisher.wait()
            assert set(caught.value.failures) == {1}
        else:
            # It never published, but hears of the abort like everybody and is in step again.
            while publisher._failure is None:
                publisher._hear()
            with pytest.raises(PublishFailed):
                publisher._raise()
        edit(source, 2)
        publisher.publish()
        publisher.wait()
        publisher.close()

    run_threads(WORLD, rank_main)
    assert same(reader.replay(tmp_path, initial())[1], edited([1, 2]))


def test_a_failed_last_version_is_raised_by_close_on_all_before_rank_0_leaves(tmp_path):
    """F32: rank 0 often takes the key-value store with it, and then nobody could read why the version failed."""
    kept = threading.Event()

    def rank_main(rank, team):
        faults = [Fault("put_new", "parts/*", nth=1, effect=fail_before())] if rank == 1 else []
        source = ArraySource(owned=rows(rank, WORLD))
        store = FaultyStore(LocalStore(tmp_path), faults)
        publisher = open_rank(rank, team, tmp_path, source=source, store=store, num_put_attempts=1)
        edit(source, 1)
        publisher.publish()
        if rank == 2:
            time.sleep(0.3)
            kept.set()
        with pytest.raises(PublishFailed) as caught:
            publisher.close()
        assert set(caught.value.failures) == {1}
        if rank == 0:
            assert kept.is_set()

    run_threads(WORLD, rank_main)


def test_a_rank_that_lies_about_its_boxes_fails_the_version(tmp_path):
    # rule W4, F39: two ranks send the same rows
    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 2))
        with open_rank(rank, team, tmp_path, source=source) as publisher:
            if rank == 1:
                honest, source.owned = source.owned, tuple(ArraySource(owned=rows(0, 2)).owned)
                publisher._owned = source.owned  # keeps the lie from being announced as a new ownership
            flip(source, 1)
            publisher.publish()
            with pytest.raises(PublishFailed, match=r"rank 1 sent \[0:5, 0:6\], which it does not own"):
                publisher.wait()
            if rank == 1:
                source.owned = honest
            publisher.publish()
            publisher.wait()

    run_threads(2, rank_main)


def test_ownership_that_changes_before_the_first_version_is_learnt(tmp_path):
    """`accelerator.prepare` after attaching: all ranks decide anew at the first step, and say so with their receipt."""

    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 2))
        with open_rank(rank, team, tmp_path, source=source) as publisher:
            source.owned = tuple(ArraySource(owned=rows(1 - rank, 2)).owned)
            for seed in (1, 2):
                edit(source, seed)
                publisher.publish()
            publisher.wait()

    run_threads(2, rank_main)
    assert same(reader.replay(tmp_path, initial())[2], edited([1, 2]))


def test_new_ownership_is_said_again_after_a_failure(tmp_path):
    def rank_main(rank, team):
        faults = [Fault("put_new", "parts/*", nth=1, effect=fail_before())] if rank == 1 else []
        store = FaultyStore(LocalStore(tmp_path), faults)
        source = ArraySource(owned=rows(rank, 2))
        with open_rank(rank, team, tmp_path, source=source, store=store, num_put_attempts=1) as publisher:
            source.owned = tuple(ArraySource(owned=rows(1 - rank, 2)).owned)
            flip(source, 1)
            publisher.publish()
            with pytest.raises(PublishFailed):
                publisher.wait()
            publisher.publish()
            publisher.wait()

    run_threads(2, rank_main)
    assert same(reader.replay(tmp_path, initial())[1], edited([1], flip))


def test_ownership_that_no_longer_covers_is_refused(tmp_path):
    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 2))
        publisher = open_rank(rank, team, tmp_path, source=source)
        if rank == 0:
            source.owned = (OwnedBox(tensor=0, box=Box((0, 0), (4, 6))),)
        publisher.publish()
        with pytest.raises(PublishFailed, match="54 of 60 elements have an owner"):
            publisher.wait()
        publisher.detach()

    run_threads(2, rank_main)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([("a.weight", Box((4, 0), (6, 6)))], r"a\.weight: boxes \[0:5, 0:6\] and \[4:10, 0:6\] overlap"),
        ([("a.weight", Box((6, 0), (4, 6)))], r"a\.weight: 54 of 60 elements have an owner"),
        ([("a.weight", Box((5, 0), (6, 6)))], r"a\.weight: box \[5:11, 0:6\] lies outside"),
        ([], r"a\.weight: 30 of 60 .* b\.bias: 0 of 7"),
    ],
)
def test_attaching_proves_that_every_element_has_one_owner(tmp_path, other, said):
    # rule W7
    def rank_main(rank, team):
        source = ArraySource()
        boxes = rows(0, 2) if rank == 0 else other
        source.owned = tuple(OwnedBox(tensor=source.schema.index(name), box=box) for name, box in boxes)
        source.digests = dict
        with pytest.raises(CaptureError, match=said):
            open_rank(rank, team, tmp_path, source=source)

    run_threads(2, rank_main)
    assert not (tmp_path / "stream.json").exists()


@pytest.mark.parametrize(("name", "values"), [("every", (1, 2)), ("absolute_only", (True, False))])
def test_ranks_configured_differently_are_refused(tmp_path, name, values):
    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 2))
        with pytest.raises(CaptureError, match=f"ranks 0 and 1 were configured differently: {name} is"):
            open_rank(rank, team, tmp_path, source=source, **{name: values[rank]})

    run_threads(2, rank_main)
    assert not (tmp_path / "stream.json").exists()


def test_of_two_jobs_on_one_stream_exactly_one_wins(tmp_path):
    # rule W5
    start = threading.Barrier(4)
    jobs = [LocalKeyValue(), LocalKeyValue()]

    def open_first(rank, team):
        open_rank(rank, team, tmp_path).close()

    run_threads(2, open_first)

    def rank_main(number, _team):
        job, rank = divmod(number, 2)
        source = ArraySource(owned=rows(rank, 2))
        publisher = open_rank(rank, Team(rank, 2, jobs[job]), tmp_path, source=source)
        edit(source, 10 + job)
        start.wait(30)
        try:
            publisher.publish()
            publisher.wait()
        except Fenced as error:
            return job, str(error)
        finally:
            publisher.close()
        return job, None

    outcomes = run_threads(4, rank_main)
    assert outcomes[0][1] is None or "another writer" in outcomes[0][1]
    assert (outcomes[0][1] is None) == (outcomes[1][1] is None)  # both ranks of a job agree
    assert (outcomes[0][1] is None) != (outcomes[2][1] is None)  # and one job of the two wins
    winner = 0 if outcomes[0][1] is None else 1
    assert same(reader.replay(tmp_path, initial())[1], edited([10 + winner]))
