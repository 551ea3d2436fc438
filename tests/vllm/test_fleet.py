"""The fleet's steps against servers without a model, over both kinds of routes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.vllm.fake_server import FakeServer
from torch_delta.errors import DeadlineExceeded, FleetFailed, ServerRefused
from torch_delta.vllm.fleet import Fleet, FleetConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STREAM = "s3://bucket/run"
QUICK = FleetConfig(poll_s=0.01)


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


def in_pause(fake: FakeServer) -> list[str]:
    """What the server was asked from its last pause on."""
    last = len(fake.log) - 1 - fake.log[::-1].index("/pause")
    return fake.log[last:]


def test_an_update_over_vllms_own_routes_pauses_applies_resets_and_resumes(fakes) -> None:
    fake = fakes(num_workers=2)
    with Fleet([fake.url], stream=STREAM, config=QUICK) as fleet:
        report = fleet.update(3)
    assert in_pause(fake) == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "rpc:torch_delta_status",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    assert "/update_weights" not in fake.log[: fake.log.index("/pause")]
    assert (fake.version, fake.label, fake.paused, fake.session, fake.stale) == (3, "3", False, False, False)
    assert fake.init_infos == [{"stream": STREAM}]
    server = report.reports[fake.url]
    assert (server.version, server.from_version, server.generation) == (3, 0, "g1r0+g1r1")
    assert (server.restarted, server.applied, report.failures) == (False, True, {})
    assert list(server.phases_s) == ["pause", "start", "update", "check", "finish", "reset", "resume"]
    assert 0 < sum(server.phases_s.values()) <= server.pause_s <= report.total_s
    assert report.pause_s == server.pause_s


def test_an_update_over_the_plugins_routes_leaves_the_pause_to_the_server(fakes) -> None:
    fake = fakes(routes="plugin")
    with Fleet([fake.url], stream=STREAM, config=QUICK) as fleet:
        report = fleet.update(2).reports[fake.url]
    assert set(fake.log) == {f"/torch_delta/{name}" for name in ("init", "status", "prepare", "update")}
    assert (report.version, report.pause_s) == (2, 0.25)
    assert dict(report.phases_s) == {"pause": 0.125, "update": 0.125}
    sent = [body for route, body in fake.bodies if route == "/torch_delta/update"]
    options = {"mode": "auto", "timeout_s": 120.0, "resume_timeout_s": 60.0}
    assert sent == [{"version": 2, "stream_id": fake.stream_id, **options}]


def test_a_server_that_went_further_by_itself_has_not_failed(fakes) -> None:
    fake = fakes(routes="plugin")
    with Fleet([fake.url], config=QUICK) as fleet:
        fake.overtaking = 3
        report = fleet.update(2)
        assert (report.failures, report.reports[fake.url].version) == ({}, 3)
        assert fleet.update(2).reports[fake.url].version == 3


@pytest.mark.parametrize("routes", ["dev", "plugin"])
def test_a_server_that_is_there_already_is_not_paused(fakes, routes: str) -> None:
    fake = fakes(routes=routes)
    with Fleet([fake.url], config=QUICK) as fleet:
        fleet.update(4)
        num_applies = sum(route in ("/update_weights", "/torch_delta/update") for route in fake.log)
        report = fleet.update(4).reports[fake.url]
        assert fleet.metrics().num_applied == 1
    assert (report.applied, report.pause_s, report.version, report.from_version) == (False, 0.0, 4, 4)
    assert sum(route in ("/update_weights", "/torch_delta/update") for route in fake.log) == num_applies == 1


@pytest.mark.parametrize("routes", ["dev", "plugin"])
def test_a_reload_is_a_reload_also_where_the_version_runs_already(fakes, routes: str) -> None:
    """As it does on a server that follows by itself and was faster than the fleet."""
    fake = fakes(routes=routes)
    with Fleet([fake.url], config=QUICK) as fleet:
        fleet.update(4)
        with Fleet([fake.url], config=FleetConfig(poll_s=0.01, mode="reload")) as reloading:
            report = reloading.update(4).reports[fake.url]
    assert (report.applied, report.version, report.from_version) == (True, 4, 4)
    assert sum(route in ("/update_weights", "/torch_delta/update") for route in fake.log) == 2


def test_init_tells_each_process_once(fakes) -> None:  # idempotent
    fake, other = fakes(), fakes(routes="plugin")
    info = {"mode": "reload", "timeout_s": 30}
    with Fleet([fake.url, other.url], stream=STREAM, init_info=info, config=QUICK) as fleet:
        first, second = fleet.init(), fleet.init()
    assert first == second
    assert fake.init_infos == other.init_infos == [{"stream": STREAM, **info}]


def test_a_server_that_somebody_else_led_astray_is_called_back(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], stream=STREAM, config=QUICK) as fleet:
        fleet.update(1)
        with Fleet([fake.url], stream="s3://bucket/other", config=QUICK) as other:
            other.init()
        fleet.update(2)
    assert [info["stream"] for info in fake.init_infos] == [STREAM, "s3://bucket/other", STREAM]


def test_a_server_that_could_not_attach_is_told_again(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], stream=STREAM, config=QUICK) as fleet:
        fleet.init()
        fake.state = "failed"
        fleet.init()
        fake.state = "serving"
        fleet.init()
    assert len(fake.init_infos) == 2


def test_nobody_is_paused_before_everybody_has_prepared(fakes) -> None:  # rows F31, F108
    fast, slow = fakes(), fakes()
    slow.may_prepare.clear()
    with Fleet([fast.url, slow.url], config=QUICK) as fleet, ThreadPoolExecutor(1) as pool:
        update = pool.submit(fleet.update, 1)
        fast.wait_for("rpc:torch_delta_prepare")
        slow.wait_for("rpc:torch_delta_prepare")
        assert "/pause" not in fast.log
        slow.may_prepare.set()
        report = update.result()
    assert sorted(report.reports) == sorted([fast.url, slow.url])
    assert fast.log.index("/pause") > fast.log.index("rpc:torch_delta_prepare")


def test_prepare_alone_pauses_nobody(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], config=QUICK) as fleet:
        prepared = fleet.prepare(5)[fake.url]
        asked = [body["args"] for route, body in fake.bodies if route == "rpc:torch_delta_prepare"]
        assert asked == [[{"version": 5, "timeout_s": 600.0}]], "workers give up when the client does"
        assert "/pause" not in fake.log
        assert (prepared.version, prepared.prepared, fake.version) == (5, 5, 0)
        fleet.update(5)
    assert fake.version == 5


def test_every_request_carries_the_token(fakes) -> None:  # row F117
    fake = fakes(token="secret")
    with Fleet([fake.url], token="secret", config=QUICK) as fleet:
        fleet.update(1)
    with Fleet([fake.url], config=QUICK) as fleet, pytest.raises(FleetFailed) as caught:
        fleet.update(2)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure, ServerRefused)
    assert failure.status == 401
    assert "pass the server's API key as token=" in str(failure)
    assert fake.version == 1


def test_a_server_without_any_control_route_is_told_apart(fakes) -> None:
    fake = fakes(routes="none")
    with Fleet([fake.url], config=QUICK) as fleet, pytest.raises(FleetFailed, match="VLLM_PLUGINS=torch_delta"):
        fleet.init()


def test_a_late_server_is_rolled_forward_and_then_takes_part(fakes) -> None:
    old, late = fakes(), fakes()
    with Fleet([old.url], config=QUICK) as fleet:
        fleet.update(3)
        fleet.add(late.url, wait_s=20)
        assert (late.version, late.paused) == (3, False)
        report = fleet.update(4)
        assert sorted(report.reports) == sorted([old.url, late.url])
        metrics = fleet.metrics()
    assert (late.version, metrics.num_servers, metrics.num_rejoins, metrics.num_applied) == (4, 2, 1, 4)


def test_a_late_server_delays_nobody(fakes) -> None:
    old, late = fakes(), fakes()
    late.may_prepare.clear()
    with Fleet([old.url], config=QUICK) as fleet:
        fleet.update(1)
        fleet.add(late.url)
        late.wait_for("rpc:torch_delta_prepare")
        assert sorted(fleet.update(2).reports) == [old.url]
        assert sorted(fleet.update(3).reports) == [old.url]
        assert fleet.status().servers[late.url].role == "joining"
        assert fleet.ready(3) == {old.url: True, late.url: False}
        with pytest.raises(DeadlineExceeded, match="catch up"):
            fleet.wait_caught_up(0.01)
        late.may_prepare.set()
        fleet.wait_caught_up(20)
        assert late.version == 3, "it must reach the newest version, not the one it started with"
        assert fleet.status().servers[late.url].role == "member"


def test_a_restarted_server_is_noticed_and_initialised_again(fakes) -> None:  # row F101
    fake = fakes()
    with Fleet([fake.url], stream=STREAM, config=QUICK) as fleet:
        fleet.update(1)
        fake.restart()
        report = fleet.update(2).reports[fake.url]
        assert fleet.metrics().num_restarts == 1
    assert (report.restarted, report.from_version, report.version) == (True, 0, 2)
    assert report.generation == "g2r0"
    assert len(fake.init_infos) == 2


def test_a_server_restarted_with_other_routes_is_followed(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], config=QUICK) as fleet:
        fleet.update(1)
        fake.routes = "plugin"
        fake.restart()
        with pytest.raises(FleetFailed, match="404"):  # the next attempt looks for its new routes
            fleet.update(2)
        assert fleet.update(3).reports[fake.url].version == 3


def test_ready_is_a_statement_about_a_version(fakes) -> None:  # row F99
    fake, dead = fakes(), fakes()
    with Fleet([fake.url, dead.url], config=QUICK) as fleet:
        assert fleet.ready(0) == {fake.url: False, dead.url: False}, "not initialised: nothing is known"
        fleet.update(2)
        dead.stop()
        assert fleet.ready(2) == {fake.url: True, dead.url: False}
        assert fleet.ready(3) == {fake.url: False, dead.url: False}
        status = fleet.status()
        assert (status.target, status.servers[fake.url].version) == (2, 2)
        assert [worker.rank for worker in status.servers[fake.url].workers] == [0]
        assert list(status.failures) == [dead.url]


def test_workers_that_differ_have_no_version(fakes) -> None:
    fake = fakes(num_workers=2)
    with Fleet([fake.url], config=QUICK) as fleet:
        fleet.update(1)
        workers = fake.workers()
        workers[0]["version"] = 0
        fake.workers = lambda: workers
        assert fleet.status().servers[fake.url].version is None
        assert fleet.ready(0) == {fake.url: False}


def test_updates_of_two_threads_run_one_after_the_other(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], config=QUICK) as fleet, ThreadPoolExecutor(4) as pool:
        list(pool.map(fleet.update, [7] * 4))
        assert fleet.metrics().num_applied == 1
    assert fake.log.count("/pause") == 1


def test_closing_ends_a_wait_for_a_prepare(fakes) -> None:
    fake = fakes()
    fake.may_prepare.clear()
    fleet = Fleet([fake.url], config=QUICK)
    failures: list[Exception] = []

    def update() -> None:
        try:
            fleet.update(1)
        except FleetFailed as error:
            failures.extend(error.failures.values())

    thread = threading.Thread(target=update)
    thread.start()
    fake.wait_for("rpc:torch_delta_prepare")
    fleet.close()
    thread.join(20)
    assert not thread.is_alive()
    assert ["closed" in str(failure) for failure in failures] == [True]


def test_a_removed_server_is_not_spoken_to(fakes) -> None:
    one, two = fakes(), fakes()
    with Fleet([one.url, two.url + "/"], config=QUICK) as fleet:
        fleet.remove(two.url)
        fleet.update(1)
        with pytest.raises(ValueError, match="no server"):
            fleet.remove(two.url)
    assert two.log == []


def test_verify_asks_every_member(fakes) -> None:
    one, two = fakes(), fakes(routes="plugin")
    with Fleet([one.url, two.url], config=QUICK) as fleet:
        fleet.verify()
    assert "rpc:torch_delta_verify" in one.log
    assert "/torch_delta/verify" in two.log


@pytest.mark.parametrize("version", [-1, True, "3", 1.0, None])
def test_a_version_is_a_number_of_the_stream(fakes, version: object) -> None:
    with Fleet([fakes().url], config=QUICK) as fleet, pytest.raises(ValueError, match="version number"):
        fleet.update(version)


def test_what_cannot_work_is_refused_when_the_fleet_is_made() -> None:  # row F115
    for url in ("host:8000", "ftp://host", "http://", "http://user:pw@host", "http://host?x=1"):
        with pytest.raises(ValueError, match=r"expected the URL|carries credentials") as caught:
            Fleet([url])
        assert "pw" not in str(caught.value)
    with pytest.raises(ValueError, match="visible ASCII"):
        Fleet(["http://host"], token="secret\n")
    with pytest.raises(ValueError, match="different streams"):
        Fleet([], stream="s3://a/b", init_info={"stream": "s3://a/c"})
    with pytest.raises(ValueError, match="on_failure"):
        FleetConfig(on_failure="ignore")
    with pytest.raises(ValueError, match="apply_timeout_s"):
        FleetConfig(apply_timeout_s=0)
    with pytest.raises(ValueError, match="add\\(url\\) first"):
        Fleet([]).update(1)
