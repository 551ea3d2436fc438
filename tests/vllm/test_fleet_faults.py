"""Servers that fail, each at a scripted place: they are named, nobody stays paused, and the others get the version."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.vllm.fake_server import FakeServer
from torch_delta.errors import DeadlineExceeded, FleetFailed, ServerRefused, ServerUnavailable
from torch_delta.vllm.fleet import Fleet, FleetConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUICK = {"poll_s": 0.01, "resume_timeout_s": 20.0}
IN_PAUSE = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]


@pytest.fixture
def fakes() -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(**options: object) -> FakeServer:
        made.append(FakeServer(**options))
        return made[-1]

    yield make
    for fake in made:
        fake.stop()
    assert [problem for fake in made for problem in fake.problems] == []


def phases(fleet: Fleet) -> dict[str, int]:
    return dict(fleet.metrics().num_failures)


@pytest.mark.parametrize("kind", ["error", "drop"])
@pytest.mark.parametrize("route", ["/pause", *IN_PAUSE])
def test_a_failure_in_the_pause_is_named_and_ends_resumed(fakes, route: str, kind: str) -> None:
    bad, good = fakes(), fakes()
    with Fleet([bad.url, good.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.init()
        fault = bad.fail(route, kind)
        report = fleet.update(1)
        assert fault.fired == 1
        assert list(report.failures) == [bad.url]
        assert list(report.reports) == [good.url]
        failure = report.failures[bad.url]
        assert isinstance(failure, ServerRefused if kind == "error" else ServerUnavailable)
        assert bad.url in str(failure)
        assert phases(fleet) == {route.strip("/").split("_")[0]: 1}
        assert (bad.paused, bad.session, good.version, good.paused) == (False, False, 1, False)
        assert bad.log[-1] == "/resume"
        assert list(fleet.status().excluded) == [bad.url]
        # and the next version rolls it forward: it takes part again
        assert sorted(fleet.update(2).reports) == [good.url]
        fleet.wait_caught_up(20)
        assert (bad.version, bad.paused, bad.session, bad.stale) == (2, False, False, False)
        assert sorted(fleet.update(3).reports) == sorted([bad.url, good.url])


@pytest.mark.parametrize("route", ["/pause", *IN_PAUSE, "/resume"])
def test_an_answer_that_is_lost_after_the_effect_leaves_nothing_open(fakes, route: str) -> None:
    fake = fakes()
    with Fleet([fake.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.init()
        fault = fake.fail(route, "drop", after=True)
        if route == "/resume":  # is tried again
            assert fleet.update(1).reports[fake.url].version == 1
        else:
            with pytest.raises(FleetFailed):
                fleet.update(1)
        assert fault.fired == 1
        assert (fake.paused, fake.session) == (False, False)
        assert fleet.update(2).reports[fake.url].version == 2
        assert (fake.version, fake.stale, fake.label) == (2, False, "2")


@pytest.mark.parametrize("route", ["/pause", *IN_PAUSE])
def test_a_server_that_hangs_in_the_pause_runs_into_the_deadline(fakes, route: str) -> None:  # row F32
    bad, good = fakes(), fakes()
    with Fleet([bad.url, good.url], config=FleetConfig(**QUICK, apply_timeout_s=0.5)) as fleet:
        fleet.init()
        fault = bad.fail(route, "hang")
        report = fleet.update(1)
        assert fault.fired == 1
        failure = report.failures[bad.url]
        assert isinstance(failure, DeadlineExceeded)
        assert (failure.phase, failure.peer, failure.timeout_s) == (
            route.strip("/").split("_")[0],
            bad.url,
            0.5,
        )
        assert bad.log[-1] == "/resume"
        assert (bad.paused, good.version) == (False, 1)


def test_resume_is_tried_until_it_works(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.init()
        faults = [fake.fail("/resume", "error", times=2), fake.fail("/resume", "drop")]
        assert fleet.update(1).reports[fake.url].version == 1
    assert [fault.fired for fault in faults] == [2, 1]
    assert fake.log.count("/resume") == 4
    assert not fake.paused


def test_a_server_that_cannot_be_resumed_is_said_to_be_paused_and_resumed_later(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], config=FleetConfig(poll_s=0.01, resume_timeout_s=0.2)) as fleet:
        fleet.init()
        fault = fake.fail("/resume", "error", times=10**6)
        with pytest.raises(FleetFailed, match="may still be paused"):
            fleet.update(1)
        assert fake.paused
        assert fleet.ready(1) == {fake.url: False}
        fault.times = fault.fired
        fleet.update(1)
        assert (fake.paused, fake.version) == (False, 1)
        assert fleet.ready(1) == {fake.url: True}


def test_a_refused_reset_is_a_failure_and_made_up_for(fakes) -> None:  # row F109
    fake = fakes(refuse_resets=1)
    with Fleet([fake.url], config=FleetConfig(**QUICK)) as fleet:
        with pytest.raises(FleetFailed, match="did not reset its prefix cache"):
            fleet.update(1)
        assert phases(fleet) == {"reset": 1}
        assert (fake.version, fake.stale, fake.paused) == (1, True, False)
        assert fleet.ready(1) == {fake.url: False}, "new weights with old cached values are not ready"
        assert fleet.update(1).reports[fake.url].applied
        assert (fake.version, fake.stale) == (1, False)
        assert fleet.ready(1) == {fake.url: True}


def test_a_prepare_that_fails_names_the_workers_reason(fakes) -> None:  # rows F01, F02
    bad, good = fakes(prepare_error="bucket is gone"), fakes()
    with Fleet([bad.url, good.url], config=FleetConfig(**QUICK)) as fleet:
        report = fleet.update(1)
        failure = report.failures[bad.url]
        assert (failure.phase, failure.rank, failure.type) == ("prepare", 0, "StoreUnavailable")
        assert "bucket is gone" in str(failure)
        assert "/pause" not in bad.log
        assert good.version == 1
        bad.prepare_error = None
        fleet.update(2)
        fleet.wait_caught_up(20)
        assert bad.version == 2


def test_an_older_error_is_not_that_of_a_prepare_that_has_not_begun(fakes) -> None:
    """Of an update that was refused, and of a prepare before this one."""
    fake = fakes()
    with Fleet([fake.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.update(1)
        for phase in ("apply", "prepare"):
            fake.leftover = {"phase": phase, "type": "RequestRefused", "message": "unknown field typo"}
            version = fake.version + 1
            assert fleet.update(version).reports[fake.url].version == version
            assert fake.leftover is None, "it was shown"


def test_a_prepare_that_does_not_end_runs_into_the_deadline(fakes) -> None:  # row F32
    bad, good = fakes(), fakes()
    bad.may_prepare.clear()
    with Fleet([bad.url, good.url], config=FleetConfig(**QUICK, prepare_timeout_s=0.3)) as fleet:
        failure = fleet.update(1).failures[bad.url]
        assert isinstance(failure, DeadlineExceeded)
        assert (failure.phase, failure.peer) == ("prepare version 1", bad.url)
        assert phases(fleet) == {"prepare": 1}
        assert "/pause" not in bad.log
        assert good.version == 1


def test_a_server_restarted_while_it_prepares_is_not_taken_for_prepared(fakes) -> None:  # row F101
    fake = fakes()
    with Fleet([fake.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.update(1)
        honest = fake._prepare

        def restart_then_answer(version: int) -> list[dict]:
            answer = honest(version)
            fake.generation += 1
            return answer

        fake._prepare = restart_then_answer
        with pytest.raises(FleetFailed, match="was restarted while it prepared"):
            fleet.update(2)
        fake._prepare = honest
        assert fleet.update(2).reports[fake.url].restarted


def test_a_dead_server_is_left_out_and_comes_back(fakes) -> None:
    dying, good = fakes(), fakes()
    with Fleet([dying.url, good.url], stream="s3://bucket/run", config=FleetConfig(**QUICK)) as fleet:
        fleet.update(1)
        dying.stop()
        report = fleet.update(2)
        assert isinstance(report.failures[dying.url], ServerUnavailable)
        assert fleet.metrics().num_excluded == 1
        assert list(fleet.update(3).reports) == [good.url]  # still dead
        with pytest.raises(FleetFailed, match="catch up"):
            fleet.wait_caught_up(20)
        dying.restart()
        fleet.add(dying.url, wait_s=20)
        assert dying.version == 3
        metrics = fleet.metrics()
        assert (metrics.num_excluded, metrics.num_rejoins, metrics.num_restarts) == (0, 1, 1)
        assert sorted(fleet.update(4).reports) == sorted([dying.url, good.url])


def test_policy_raise_stops_before_any_pause_when_a_prepare_fails(fakes) -> None:
    bad, good = fakes(prepare_error="bucket is gone"), fakes()
    with Fleet([bad.url, good.url], config=FleetConfig(**QUICK, on_failure="raise")) as fleet:
        with pytest.raises(FleetFailed, match="bucket is gone") as caught:
            fleet.update(1)
        assert list(caught.value.failures) == [bad.url]
        assert list(caught.value.reports) == [good.url]
        assert caught.value.__cause__ is caught.value.failures[bad.url]
        assert "/pause" not in bad.log + good.log
        assert fleet.status().excluded == {}
        bad.prepare_error = None
        assert sorted(fleet.update(1).reports) == sorted([bad.url, good.url])


def test_policy_raise_says_who_has_the_version_when_an_apply_fails(fakes) -> None:
    bad, good = fakes(), fakes()
    with Fleet([bad.url, good.url], config=FleetConfig(**QUICK, on_failure="raise")) as fleet:
        fleet.init()
        bad.fail("/update_weights", "error")
        with pytest.raises(FleetFailed) as caught:
            fleet.update(1)
        assert caught.value.reports[good.url].version == 1
        assert (bad.version, bad.paused, good.version, good.paused) == (0, False, 1, False)
        assert fleet.update(1).reports[bad.url].version == 1


def test_when_every_server_fails_the_caller_hears_of_it(fakes) -> None:  # never a quiet success
    one, two = fakes(), fakes()
    with Fleet([one.url, two.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.init()
        for fake in (one, two):
            fake.fail("/update_weights", "error")
        with pytest.raises(FleetFailed, match="2 of 2") as caught:
            fleet.update(1)
        assert sorted(caught.value.failures) == sorted([one.url, two.url])


@pytest.mark.parametrize("kind", ["garbage", "short", "drip", "hang"])
def test_nonsense_in_place_of_a_status_is_an_error_of_that_server(fakes, kind: str) -> None:
    bad = fakes(routes="plugin")
    bad.fail("/torch_delta/status", kind)
    began_s = time.monotonic()
    config = FleetConfig(**QUICK, status_timeout_s=0.5)
    with Fleet([bad.url], config=config) as fleet, pytest.raises(FleetFailed) as caught:
        fleet.init()
    (failure,) = caught.value.failures.values()
    assert type(failure) is {"garbage": ServerRefused, "short": ServerUnavailable}.get(kind, DeadlineExceeded)
    assert bad.url in str(failure)
    assert time.monotonic() - began_s < 20, "the deadline is of the whole exchange, not of each byte"


def test_an_update_the_plugin_refuses_carries_its_reason(fakes) -> None:
    fake = fakes(routes="plugin")
    with Fleet([fake.url], config=FleetConfig(**QUICK)) as fleet:
        fleet.init()
        fake.fail("/torch_delta/update", "error", status=409)
        with pytest.raises(FleetFailed, match="scripted failure"):
            fleet.update(1)
        assert phases(fleet) == {"update": 1}
        assert fleet.update(1).reports[fake.url].version == 1
