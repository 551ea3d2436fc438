"""`torch-delta doctor`: what it finds in a healthy store, and that it notices each promise a store can break."""

from __future__ import annotations

import json
import threading
import time

import pytest

from tests.store.servers import use
from torch_delta.cli import main
from torch_delta.cli.checkup import NUM_RACERS, Checkup
from torch_delta.errors import StoreUnavailable
from torch_delta.store import MemoryStore
from torch_delta.store.base import ObjectInfo
from torch_delta.testing import Fault, FaultyStore
from torch_delta.testing.faults import fail_before, flip_bit

CHECKS = ["read", "write", "create once", "overwrite", "list", "clock", "latency", "throughput", "delete"]


class Careless(MemoryStore):
    """Accepts the condition of a create and ignores it."""

    def put_new(self, key, data):
        content = b"".join(bytes(piece) for piece in ([data] if isinstance(data, bytes) else data))
        self._shelf.objects[key] = (content, time.time())
        return ObjectInfo(key, len(content))


class Racy(MemoryStore):
    """Looks, and then writes: two writers that look at the same time both win."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Barrier(NUM_RACERS)

    def put_new(self, key, data):
        if "race" in key:
            assert key not in self._shelf.objects
            self.looked.wait(60)
            self._shelf.objects.pop(key, None)
            with self._shelf.lock:
                self._shelf.objects[key] = (data, 0.0)
            return ObjectInfo(key, len(data))
        return super().put_new(key, data)


class Lagging(MemoryStore):
    def list(self, prefix="", *, start_after=None):
        found = super().list(prefix, start_after=start_after)
        return (info for info in found if not info.key.endswith("listed-1"))


class Skewed(MemoryStore):
    def stat(self, key):
        info = super().stat(key)
        return ObjectInfo(info.key, info.size_bytes, info.modified_s + 3600)


class Locked(MemoryStore):
    def delete(self, key):
        pass


def examine(store) -> dict[str, str]:
    checkup = Checkup(store)
    statuses = {finding.name: finding.status for finding in checkup.run()}
    assert [*statuses] == CHECKS
    return {name: status for name, status in statuses.items() if status != "ok"}


def test_a_healthy_store_is_left_as_it_was() -> None:
    store = MemoryStore()
    store.put_new("stream.json", b"x")
    checkup = Checkup(store)
    assert [finding.status for finding in checkup.run()] == ["ok"] * len(CHECKS)
    assert [info.key for info in store.list()] == ["stream.json"]
    assert min(checkup.measured.put_s, checkup.measured.get_s, checkup.measured.stat_s) > 0
    assert min(checkup.measured.put_bytes_per_s, checkup.measured.get_bytes_per_s) > 0
    assert abs(checkup.measured.clock_skew_s) < 5


@pytest.mark.parametrize("store", [Careless(), Racy()])
def test_a_store_that_lets_two_writers_win_is_refused(store) -> None:
    assert examine(store) == {"create once": "failed"}


@pytest.mark.parametrize(
    ("store", "found"),
    [(Lagging(), {"list": "failed"}), (Skewed(), {"clock": "warning"})],
)
def test_broken_promises_are_named(store, found) -> None:
    assert examine(store) == found


def test_objects_that_cannot_be_deleted_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr("torch_delta.cli.checkup._VISIBLE_WITHIN_S", 0.0)
    assert examine(Locked()) == {"delete": "failed"}


def test_damage_on_the_way_is_noticed() -> None:
    store = FaultyStore(MemoryStore(), [Fault("get", "doctor/*/small", effect=flip_bit(byte=5))])
    assert examine(store)["write"] == "failed"
    store.assert_fired()


def test_without_the_right_to_write_the_rest_is_skipped_and_following_is_possible(monkeypatch, capsys) -> None:
    refused = StoreUnavailable("403: Access is refused: check the credentials", outcome="absent")
    store = FaultyStore(MemoryStore(), [Fault("put_new", effect=fail_before(refused))])
    monkeypatch.setattr("torch_delta.cli.run.open_store", lambda url: store)
    assert main(["doctor", "s3://bucket/run"]) == 1
    said = capsys.readouterr().out
    assert "check the credentials" in said
    assert "one that is there already can be followed" in said
    assert said.count("skipped") == len(CHECKS) - 2
    store.assert_fired()


def test_nothing_is_tried_without_access(monkeypatch, capsys) -> None:
    store = FaultyStore(MemoryStore(), [Fault("stat", effect=fail_before(StoreUnavailable("no such bucket")))])
    monkeypatch.setattr("torch_delta.cli.run.open_store", lambda url: store)
    assert main(["doctor", "s3://bucket/run", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is False
    assert [check["status"] for check in record["checks"]] == ["failed"] + ["skipped"] * (len(CHECKS) - 1)
    assert store.calls["put_new"] == 0


def test_a_clock_that_is_off_is_a_warning_only(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch_delta.cli.run.open_store", lambda url: Skewed())
    assert main(["doctor", "s3://bucket/run", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is True
    assert 3595 < record["clock_skew_s"] < 3605
    assert ["NTP" in check["advice"] for check in record["checks"] if check["status"] == "warning"] == [True]


def test_a_directory(tmp_path, capsys) -> None:
    assert main(["doctor", str(tmp_path / "run")]) == 0
    assert "a stream can be written and followed here" in capsys.readouterr().out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_hub_bucket(hub_url, hub, capsys) -> None:
    assert main(["doctor", hub_url]) == 0
    assert "exactly one created" in capsys.readouterr().out
    assert all(not bucket for bucket in hub.buckets.values())


@pytest.mark.s3
def test_an_s3_bucket(seaweed, monkeypatch, capsys) -> None:
    use(monkeypatch, seaweed.environment)
    assert main(["doctor", seaweed.fresh_url()]) == 0
    assert "exactly one created" in capsys.readouterr().out
    assert main(["doctor", "s3://no-such-bucket/run"]) == 1
    assert "no such bucket: create it" in capsys.readouterr().out
