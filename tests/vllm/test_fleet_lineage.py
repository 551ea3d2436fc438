"""A stream that a restarted trainer continues in another: numbers begin anew, and a number alone says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.fake_server import FakeServer
from torch_delta.errors import FleetFailed
from torch_delta.vllm.fleet import Fleet, FleetConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD, NEW = "a" * 32, "b" * 32
QUICK = FleetConfig(poll_s=0.01)
WAIT_S = 20.0


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


def num_applies(fake: FakeServer) -> int:
    return sum(route in ("/update_weights", "/torch_delta/update") for route in fake.log)


@pytest.mark.parametrize("routes", ["dev", "plugin"])
@pytest.mark.parametrize("version", [2, 7])  # an older number, and the one that the server has of the old stream
@pytest.mark.parametrize("stream_id", [None, NEW])
def test_a_number_of_the_old_stream_is_not_that_of_the_new(fakes, routes, version, stream_id) -> None:
    fake = fakes(routes=routes, num_workers=2)
    with Fleet([fake.url], config=QUICK) as fleet:
        assert fleet.update(7).reports[fake.url].stream_id == OLD
        assert (fleet.status().target, fleet.status().stream_id) == (7, OLD)
        fake.successor = NEW
        report = fleet.update(version, stream_id=stream_id).reports[fake.url]
        assert (report.version, report.stream_id, report.applied) == (version, NEW, True)
        assert (fake.stream_id, fake.version, num_applies(fake)) == (NEW, version, 2)
        status = fleet.status()
        assert (status.target, status.stream_id) == (version, NEW)
        assert (status.servers[fake.url].stream_id, status.servers[fake.url].version) == (NEW, version)
        assert fleet.ready(version) == {fake.url: True}
        assert fleet.ready(version, stream_id=OLD) == {fake.url: False}
        assert not fleet.update(version, stream_id=stream_id).reports[fake.url].applied, "now it is there"


def test_a_server_of_the_old_stream_is_not_ready_whatever_its_number(fakes) -> None:
    one, other = fakes(), fakes()
    with Fleet([one.url, other.url], config=QUICK) as fleet:
        fleet.update(7)
        one.successor = NEW  # the other does not hear of it
        report = fleet.update(3)
        assert fleet.ready(3) == {one.url: True, other.url: False}
    assert list(report.reports) == [one.url]
    assert f"prepared version 3 of stream {OLD}" in str(report.failures[other.url])
    assert (other.version, num_applies(other)) == (7, 1)


def test_a_server_that_stayed_behind_in_the_old_stream_is_rolled_forward(fakes) -> None:
    one, other = fakes(), fakes(routes="plugin")
    with Fleet([one.url, other.url], config=QUICK) as fleet:
        fleet.update(7)
        one.successor = NEW
        fleet.update(3)
        other.successor = NEW
        fleet.update(4)
        fleet.wait_caught_up(WAIT_S)
        assert fleet.ready(4) == {one.url: True, other.url: True}
    assert (other.stream_id, other.version) == (NEW, 4)


def test_a_late_server_with_the_same_number_of_the_old_stream_catches_up(fakes) -> None:
    one, late = fakes(), fakes(version=3, successor=NEW)
    one.stream_id = NEW
    with Fleet([one.url], config=QUICK) as fleet:
        fleet.update(3)
        fleet.add(late.url, wait_s=WAIT_S)
        assert fleet.ready(3) == {one.url: True, late.url: True}
    assert (late.stream_id, late.version, num_applies(late)) == (NEW, 3, 1)


def test_a_stream_that_nothing_continues_is_refused_before_any_pause(fakes) -> None:
    fake = fakes()
    with Fleet([fake.url], config=QUICK) as fleet:
        fleet.update(7)
        with pytest.raises(FleetFailed, match=f"nothing continues {OLD} as {NEW}"):
            fleet.update(7, stream_id=NEW)
    assert (fake.version, num_applies(fake), fake.paused) == (7, 1, False)


def test_servers_of_streams_that_have_nothing_to_do_with_each_other_are_told_apart(fakes) -> None:
    one, other = fakes(), fakes()
    other.stream_id = NEW
    with Fleet([one.url, other.url], config=QUICK) as fleet, pytest.raises(FleetFailed, match="follow one stream"):
        fleet.update(1)
    assert num_applies(one) == num_applies(other) == 0


@pytest.mark.parametrize("stream_id", ["", 7])
def test_a_stream_id_is_a_text(fakes, stream_id: object) -> None:
    with Fleet([fakes().url], config=QUICK) as fleet, pytest.raises(ValueError, match="id of a stream"):
        fleet.update(1, stream_id=stream_id)
