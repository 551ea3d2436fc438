"""The state machine of one rank, without vLLM: a real stream, a real working copy, a toy model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.vllm.stand_ins import Toy, write_toy_checkpoint
from tests.vllm.tiny import Versions, read_checkpoint
from torch_delta import crashpoints
from torch_delta.store import Backoff, open_store, poll
from torch_delta.stream import Stream
from torch_delta.stream.lineages import walk
from torch_delta.vllm.config import Operator
from torch_delta.vllm.ranks import Solo
from torch_delta.vllm.replica import Replica
from torch_delta.vllm.routing import check_summaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIMEOUT_S = 30.0
QUICK = Backoff(first_s=0.002, most_s=0.02)


class Rig:
    """One replica on a stream of its own; `update` and `prepare` are what a server's callers do."""

    def __init__(self, tmp_path: Path, base: Path, versions: Versions, *, environment: dict[str, str] | None = None):
        self.base, self.versions = base, versions
        self.root = tmp_path / "root"
        env = {
            "TORCH_DELTA_CHECKPOINT_ROOT": str(self.root),
            "TORCH_DELTA_ALLOWED_PATHS": str(tmp_path),
        } | (environment or {})
        self.operator = Operator.from_environment(env)
        self.replicas: list[Replica] = []

    def start(self, folder: Path | None = None, **toy: Any) -> tuple[Replica, Toy]:
        served = self.base if folder is None else folder
        model = Toy(served, **toy)
        replica = Replica(Solo(), model, str(served), check_summaries, operator=self.operator)
        self.replicas.append(replica)
        return replica, model

    def attached(self, replica: Replica, **request: Any) -> dict[str, Any]:
        replica.init({"stream": self.versions.url, "timeout_s": TIMEOUT_S} | request)
        assert replica.outcome()["ok"], replica.outcome()
        return settled(replica, lambda status: status["attached"])

    def prepared(self, replica: Replica, version: int | None = None) -> dict[str, Any]:
        assert replica.prepare({"version": version})["accepted"]
        wanted = self.versions.version if version is None else version
        return settled(replica, lambda status: status["prepared"] is not None and status["prepared"] >= wanted)

    def same(self, model: Toy, version: int) -> bool:
        wanted = self.versions.bits(version)
        return all(np.array_equal(model.values[name], bits) for name, bits in wanted.items())

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


def settled(replica: Replica, done: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The status once `done`, or once something failed."""

    def look() -> dict[str, Any] | None:
        status = replica.status()
        failed = status["error"] is not None and status["error"]["phase"] != "apply"
        return status if status["preparing"] is None and (failed or done(status)) else None

    found = poll(look, phase="settle", peer="the replica", timeout_s=TIMEOUT_S, backoff=QUICK)
    assert found is not None
    return found


def update(replica: Replica, version: int, **request: Any) -> dict[str, Any] | None:
    """One session; the error of the update, if any."""
    replica.start()
    assert replica.outcome()["ok"]
    replica.update({"version": version} | request)
    error = replica.outcome()["error"]
    replica.finish()
    assert replica.outcome()["ok"] == (error is None)
    assert not replica.outcome()["session"]
    return error


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_toy_checkpoint(tmp_path / "base")


@pytest.fixture
def rig(tmp_path: Path, base: Path) -> Iterator[Rig]:
    with Versions(base, tmp_path / "stream") as versions:
        rig = Rig(tmp_path, base, versions)
        try:
            yield rig
        finally:
            rig.close()


# -- the ordinary way --------------------------------------------------------------------------------------------------


def test_versions_are_applied_by_index_writes_and_reported_once_they_are(rig: Rig) -> None:
    replica, model = rig.start()
    assert replica.status()["state"] == "new"
    assert not replica.status()["ready"]
    status = rig.attached(replica)
    assert (status["version"], status["ready"], status["state"]) == (0, True, "serving")
    assert status["routes"] == {"num_routed": 5, "reload": {}}
    assert status["verified_full"]["ok"]
    rig.versions.sparse(1)
    status = rig.prepared(replica)
    assert (status["version"], status["prepared"], status["plan"]) == (0, 1, "patch")
    assert rig.same(model, 0), "nothing is written before the update"
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert "reload" not in model.events
    status = replica.status()
    assert (status["version"], status["ready"], status["plan"]) == (1, True, None)
    assert status["last_apply"]["kind"] == "patch"
    assert status["last_apply"]["num_changed"] > 0


def test_several_pending_versions_become_one_update(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.versions.dense(2, names=["layers.0.scale"])
    rig.versions.special(3)  # NaNs, both zeros
    status = rig.prepared(replica, 3)
    assert status["last_prepare"]["num_versions"] == 3
    assert update(replica, 3) is None
    assert rig.same(model, 3)
    assert model.events.count("write") == 1


def test_an_empty_version_is_a_version(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.nothing()
    rig.prepared(replica)
    assert update(replica, 1) is None
    assert replica.status()["version"] == 1
    assert rig.same(model, 0)


def test_the_version_it_has_already_is_no_work(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    assert update(replica, 0) is None
    assert replica.status()["last_apply"]["kind"] == "none"
    assert "write" not in model.events


def test_an_engine_that_follows_prepares_by_itself(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica, auto_follow=True)
    rig.versions.sparse(1)
    settled(replica, lambda status: status["prepared"] == 1)
    rig.versions.sparse(2)
    settled(replica, lambda status: status["prepared"] == 2)
    assert rig.same(model, 0)
    assert update(replica, 1) is None, "an older preparation stays usable"
    assert rig.same(model, 1)


def test_the_operator_may_name_the_stream(tmp_path: Path, base: Path) -> None:
    with Versions(base, tmp_path / "stream") as versions:
        rig = Rig(tmp_path, base, versions, environment={"TORCH_DELTA_STREAM": versions.url})
        replica, _ = rig.start()
        try:
            assert settled(replica, lambda status: status["attached"])["version"] == 0
        finally:
            rig.close()


def test_two_engines_of_a_host_fetch_once(rig: Rig) -> None:
    one, _ = rig.start()
    two, model = rig.start()
    rig.attached(one)
    rig.attached(two)
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    first, second = rig.prepared(one), rig.prepared(two)
    assert first["last_prepare"]["stored_bytes"] > 0
    assert second["last_prepare"]["stored_bytes"] == 0
    assert update(two, 2) is None
    assert rig.same(model, 2)
    assert one.status()["version"] == 0


# -- reload ------------------------------------------------------------------------------------------------------------


def test_tensors_without_a_route_are_loaded_again_with_their_layer(rig: Rig) -> None:
    replica, model = rig.start(unroutable={"layers.1.scale": "composed by its loader"})
    status = rig.attached(replica)
    assert status["routes"] == {"num_routed": 4, "reload": {"layers.1.scale": "composed by its loader"}}
    rig.versions.sparse(1)
    assert rig.prepared(replica)["plan"] == "mixed"
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert replica.status()["last_apply"]["kind"] == "mixed"
    rig.versions.sparse(2, names=["embed.weight"])
    assert rig.prepared(replica)["plan"] == "patch"


@pytest.mark.parametrize("mode", ["auto", "reload"])
def test_a_version_is_loaded_in_one_go_however_many_tensors_go_that_way(rig: Rig, mode: str) -> None:
    """F69: a load that ends layer by layer, once per batch of tensors, would reset the layers that are not in it."""
    by_reload = {"layers.1.scale": "composed by its loader", "embed.weight": "repacked by the engine"}
    replica, model = rig.start(unroutable=by_reload)
    assert rig.attached(replica)["routes"]["reload"] == by_reload, (
        "F55: what takes the slow path is to be seen, and why"
    )
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    rig.prepared(replica, 2)
    assert update(replica, 2, mode=mode) is None
    assert model.events.count("reload") == 1
    assert rig.same(model, 2)


def test_a_mixed_update_reloads_everything_where_the_copy_has_moved_on(rig: Rig) -> None:
    replica, model = rig.start(unroutable={"layers.1.scale": "composed by its loader"})
    other, _ = rig.start()
    rig.attached(replica)
    rig.attached(other)
    rig.versions.sparse(1)
    rig.prepared(replica, 1)
    rig.versions.sparse(2)
    rig.prepared(other, 2)
    assert update(replica, 1) is None
    assert replica.status()["version"] == 2, "the version of what was loaded, and no other"
    assert rig.same(model, 2)


def test_reload_can_be_asked_for(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    assert update(replica, 1, mode="reload") is None
    assert rig.same(model, 1)
    assert model.events.count("reload") == 1
    assert "write" not in model.events


def test_an_engine_that_only_reloads_needs_no_routes(rig: Rig) -> None:
    replica, model = rig.start()
    status = rig.attached(replica, mode="reload")
    assert (status["version"], status["routes"]["num_routed"]) == (0, 0)
    rig.versions.sparse(1)
    assert rig.prepared(replica)["plan"] == "reload"
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert "probe" not in model.events


def test_a_late_joiner_reloads_once_and_then_patches(rig: Rig) -> None:
    """F99: it is not ready before."""
    early, _ = rig.start()
    rig.attached(early)
    rig.versions.sparse(1)
    rig.prepared(early)
    assert update(early, 1) is None
    late, model = rig.start()
    status = rig.attached(late)
    assert (status["version"], status["ready"]) == (None, False)
    assert "reloads all weights" in status["needs_reload"]
    assert rig.prepared(late, 1)["plan"] == "reload"
    assert update(late, 1) is None
    assert rig.same(model, 1)
    assert late.status()["ready"]
    rig.versions.sparse(2)
    assert rig.prepared(late, 2)["plan"] == "patch"
    assert update(late, 2) is None
    assert rig.same(model, 2)


def test_a_gap_in_the_kept_patches_is_bridged_by_a_reload(rig: Rig) -> None:
    """As after an anchor, or on a disk that somebody cleaned up."""
    replica, model = rig.start()
    rig.attached(replica)
    other, _ = rig.start()
    rig.attached(other)
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    rig.prepared(other)
    patches = [path for path in rig.root.rglob("*") if path.is_file() and "patch" in path.parent.name]
    assert len(patches) == 2
    patches[0].unlink()
    status = rig.prepared(replica)
    assert (status["plan"], status["last_prepare"]["reason"] != "") == ("reload", True)
    assert update(replica, 2) is None
    assert replica.status()["last_apply"]["kind"] == "reload"
    assert rig.same(model, 2)


def test_a_server_that_starts_from_a_pulled_version_is_at_it(rig: Rig, tmp_path: Path) -> None:
    early, _ = rig.start()
    rig.attached(early)
    rig.versions.sparse(1)
    rig.prepared(early)
    late, _ = rig.start(rig.versions.write(1, tmp_path / "pulled"))
    assert rig.attached(late, base=str(rig.base))["version"] == 1


def test_weights_that_the_backend_changes_take_the_reload_path(rig: Rig) -> None:
    replica, model = rig.start()
    model.values["layers.0.scale"] ^= 1  # repacked after loading
    status = rig.attached(replica)
    assert (status["version"], status["ready"]) == (0, True)
    assert list(status["routes"]["reload"]) == ["layers.0.scale"]


def test_made_up_weights_are_never_taken_for_the_base(rig: Rig) -> None:
    """F74: the served files are right, but vLLM did not read them."""
    replica, model = rig.start()
    model.holds_served_files = False
    model.values["layers.0.scale"] ^= 1
    status = rig.attached(replica)
    assert (status["version"], status["ready"]) == (None, False)
    rig.prepared(replica, 0)
    assert update(replica, 0) is None
    assert rig.same(model, 0)
    assert replica.status()["ready"]


@pytest.mark.parametrize("unroutable", [{}, {"layers.0.scale": "its loader computes with it"}])
def test_weights_of_another_run_are_never_taken_for_the_base(rig: Rig, tmp_path: Path, unroutable: Any) -> None:
    """A server that followed one stream and is told of another that begins at the files it was started from."""
    replica, model = rig.start(unroutable=unroutable)
    rig.attached(replica)
    rig.versions.dense(1)
    rig.prepared(replica)
    assert update(replica, 1) is None
    other = Versions(rig.base, str(tmp_path / "other"))
    replica.init({"stream": other.url, "timeout_s": TIMEOUT_S})
    status = settled(replica, lambda status: status["attached"] and status["stream"] == other.url)
    assert (status["version"], status["ready"]) == (None, False)
    assert "reloads all weights" in status["needs_reload"]
    assert replica.prepare({"version": 0})["accepted"]
    settled(replica, lambda status: status["prepared"] == 0)
    assert update(replica, 0) is None
    assert rig.same(model, 0)
    assert (replica.status()["version"], replica.status()["ready"]) == (0, True)


def test_lost_weights_are_reloaded_and_nothing_is_ready_before(rig: Rig) -> None:
    """F120."""
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    replica.sleeps()
    replica.weights_lost("the engine slept at level 2, which drops the weights")
    for name in model.values:
        model.values[name][:] = 0
    status = replica.status()
    assert (status["state"], status["version"], status["ready"]) == ("lost", None, False)
    assert "sleeps" in str(update(replica, 1))
    assert rig.prepared(replica)["plan"] == "reload"
    replica.wakes()
    assert not replica.status()["ready"]
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert replica.status()["ready"]


def test_sleep_at_level_one_keeps_the_version_and_forgets_the_plans(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    replica.sleeps()
    assert not replica.status()["ready"]
    assert update(replica, 1) is not None
    replica.wakes()
    assert replica.status()["ready"]
    rig.prepared(replica)
    assert update(replica, 1) is None
    assert rig.same(model, 1)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_an_exception_after_the_write_is_undone(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    with crashpoints.armed("vllm.written", fail):
        error = update(replica, 1)
    assert error is not None
    assert error["type"] == "ApplyFailed"
    assert error["facts"]["undone"] is True
    assert rig.same(model, 0)
    status = replica.status()
    assert (status["version"], status["ready"], status["error"]["phase"]) == (0, True, "apply")
    assert update(replica, 1) is None, "the same preparation holds"
    assert rig.same(model, 1)
    assert replica.status()["error"] is None


def test_what_cannot_be_undone_makes_the_engine_dirty_until_a_reload(rig: Rig) -> None:
    """F07."""
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    model.faults["rollback"] = OSError("bad memory")
    with crashpoints.armed("vllm.written", fail):
        error = update(replica, 1)
    assert error is not None
    assert error["facts"]["undone"] is False
    status = replica.status()
    assert (status["state"], status["version"], status["ready"]) == ("dirty", None, False)
    assert rig.prepared(replica, 1)["plan"] == "reload"
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert replica.status()["ready"]


def test_a_reload_that_fails_half_way_makes_the_engine_dirty(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    model.faults["reload a tensor"] = RuntimeError("loader")
    error = update(replica, 1, mode="reload")
    assert error is not None
    assert "loader" in error["message"]
    assert replica.status()["state"] == "dirty"
    assert update(replica, 1) is None
    assert rig.same(model, 1)


def test_a_reload_that_loads_other_bits_is_found(rig: Rig) -> None:
    """F70."""
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    keep = model.keep
    model.keep = lambda name, full: keep(name, full ^ (1 if name == "layers.1.scale" else 0))  # type: ignore[method-assign]
    error = update(replica, 1, mode="reload")
    assert error is not None
    assert "layers.1.scale" in error["message"]
    assert replica.status()["state"] == "dirty"


def test_weights_that_something_else_changed_are_noticed_before_they_are_written(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    model.values["embed.weight"][0, 0] ^= 1  # the first element, which every sparse version sets
    rig.versions.sparse(1)
    assert rig.prepared(replica)["plan"] == "reload"
    assert replica.status()["state"] == "dirty"
    assert "write" not in model.events
    assert update(replica, 1) is None
    assert rig.same(model, 1)


def test_verify_digests_all_live_weights(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    assert update(replica, 1) is None
    assert replica.verify()["accepted"]
    status = settled(replica, lambda status: not status["verifying"])
    assert (status["verified_full"]["version"], status["verified_full"]["ok"]) == (1, True)
    model.values["layers.0.proj.weight"][3, 3] ^= 4
    replica.verify()
    status = settled(replica, lambda status: status["error"])
    assert status["verified_full"]["wrong"] == ["layers.0.proj.weight"]
    assert (status["state"], status["ready"], status["error"]["phase"]) == ("dirty", False, "verify")


def test_an_update_between_plan_and_offer_is_noticed(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    rig.prepared(replica, 1)
    reached, go = threading.Event(), threading.Event()
    model.gates["plan"] = (reached, go)
    replica.prepare({"version": 2})
    assert reached.wait(TIMEOUT_S)
    assert replica.status()["preparing"]["phase"] == "plan"
    assert update(replica, 1) is None, "an update does not wait for a preparation"
    go.set()
    status = settled(replica, lambda status: status["prepared"] == 2)
    assert status["error"] is not None
    assert update(replica, 2) is not None
    rig.prepared(replica, 2)
    assert update(replica, 2) is None
    assert rig.same(model, 2)


def test_the_cache_that_could_not_be_dropped_is_said(rig: Rig) -> None:
    """F109."""
    replica, _ = rig.start()
    rig.attached(replica)
    assert update(replica, 0) is None
    replica.stale_cache("the reset was refused")
    assert not replica.status()["ready"]
    assert update(replica, 0) is None
    assert replica.status()["ready"]


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_update_before_init_says_what_to_do(rig: Rig) -> None:
    replica, model = rig.start()
    error = update(replica, 1)
    assert error is not None
    assert error["type"] == "RequestRefused"
    assert "init_info" in error["message"]
    assert replica.prepare({"version": 1})["accepted"] is False
    assert replica.verify()["accepted"] is False
    assert model.events == []


@pytest.mark.parametrize(
    ("request_", "says"),
    [({"version": 1, "verison": 2}, "verison.*known: version, mode"), ({}, "version"), ({"version": "1"}, "version")],
)
def test_update_info_that_makes_no_sense(rig: Rig, request_: dict[str, Any], says: str) -> None:
    import re

    replica, _ = rig.start()
    rig.attached(replica)
    replica.start()
    replica.update(request_)
    error = replica.outcome()["error"]
    assert error is not None
    assert re.search(says, error["message"])
    replica.finish()
    assert replica.status()["ready"]


def test_an_older_version_is_refused(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.prepared(replica)
    assert update(replica, 1) is None
    error = update(replica, 0)
    assert error is not None
    assert error["type"] == "ChainError"
    assert "not taken back" in error["message"]
    assert rig.same(model, 1)


def test_a_version_that_nobody_prepared_is_refused(rig: Rig) -> None:
    replica, _ = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    error = update(replica, 1)
    assert error is not None
    assert "prepare it first" in error["message"]
    error = update(replica, 1, mode="reload")
    assert error is not None
    assert "prepare version 1 first" in error["message"]


def test_a_version_that_never_comes_runs_into_its_deadline(rig: Rig) -> None:
    replica, _ = rig.start()
    rig.attached(replica)
    replica.prepare({"version": 7, "timeout_s": 0.3})
    status = settled(replica, lambda _: False)
    assert (status["error"]["type"], status["error"]["phase"]) == ("DeadlineExceeded", "prepare")
    assert status["ready"]
    rig.versions.sparse(1)
    assert rig.prepared(replica)["error"] is None


def test_a_version_that_is_not_published_gives_way_to_a_later_request(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    assert replica.prepare({"version": 50})["accepted"]
    waits = poll(
        lambda: (replica.status()["preparing"] or {}).get("phase") == "fetch" or None,
        phase="wait",
        peer="the replica",
        timeout_s=TIMEOUT_S,
        backoff=QUICK,
    )
    assert waits
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    assert rig.prepared(replica, 2)["error"] is None
    assert update(replica, 2) is None
    assert rig.same(model, 2)
    # Nobody waits: what is published is prepared in turn, whatever else was asked for.
    rig.versions.sparse(3)
    rig.versions.sparse(4)
    for version in (60, 3, 4):
        assert replica.prepare({"version": version})["accepted"]
    settled(replica, lambda status: status["prepared"] == 4)
    assert update(replica, 3) is None
    assert rig.same(model, 3)


@pytest.mark.parametrize("live", [1, 2])
def test_a_stream_that_a_restarted_trainer_continues_is_followed(rig: Rig, live: int) -> None:
    """Successors: version numbers begin anew, so that an older one may be newer."""
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    rig.prepared(replica, live)
    assert update(replica, live) is None
    before = replica.status()["stream_id"]
    rig.versions.restart(1)
    assert replica.prepare({"version": 0})["accepted"]
    status = settled(replica, lambda status: status["stream_id"] != before)
    assert status["error"] is None
    if live == 1:
        assert (status["version"], status["ready"], status["needs_reload"]) == (0, True, None)
    else:  # versions that the trainer gave up: they are replaced
        assert (status["version"], status["ready"], status["plan"]) == (None, False, "reload")
        assert update(replica, 0) is None
        assert "reload a tensor" in model.events
    assert rig.same(model, 0)
    rig.versions.sparse(4)
    assert rig.prepared(replica)["plan"] == "patch"
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert (replica.status()["version"], replica.status()["ready"]) == (1, True)
    assert model.num_open == 1
    replica.close()
    assert model.num_open == 0


def stream_ids(url: str) -> list[str]:
    """Of a stream and of all that continue it."""
    with open_store(url) as store:
        return [lineage.stream.load()[0].stream_id for lineage in walk(Stream(store))]


@pytest.mark.parametrize("live", [0, 1, 2])
@pytest.mark.parametrize("names_the_stream", [False, True])
def test_a_version_is_that_of_the_newest_stream_whatever_the_engine_is_at(
    rig: Rig, live: int, *, names_the_stream: bool
) -> None:
    """The old stream has versions 1 and 2 as well; the engine is at a smaller number, the same and a greater one."""
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    rig.versions.sparse(2)
    if live:
        rig.prepared(replica, live)
        assert update(replica, live) is None
    rig.versions.restart(0)
    rig.versions.sparse(3)
    old, new = stream_ids(rig.versions.url)
    assert replica.status()["stream_id"] == old
    said = replica.prepare({"version": 1} | ({"stream_id": new} if names_the_stream else {}))
    status = settled(replica, lambda status: status["answered"] >= said["request"])
    assert (status["stream_id"], status["prepared"], status["error"]) == (new, 1, None)
    error = update(replica, 1, stream_id=old)
    assert error is not None
    assert (error["type"], "prepare that version first" in error["message"]) == ("ChainError", True)
    assert update(replica, 1, stream_id=new) is None
    assert rig.same(model, 1)
    assert (replica.status()["version"], replica.status()["ready"]) == (1, True)


def test_a_version_of_a_stream_that_nothing_continues_is_refused(rig: Rig) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    said = replica.prepare({"version": 1, "stream_id": "f" * 32})
    status = settled(replica, lambda status: status["answered"] >= said["request"])
    assert status["error"]["type"] == "ChainError"
    assert "nothing continues that" in status["error"]["message"]
    assert (status["version"], status["ready"]) == (0, True)
    assert rig.same(model, 0)
    assert rig.prepared(replica, 1)["error"] is None


def test_an_engine_that_follows_goes_over_by_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_delta.receive.lookout._LOOK_AROUND_EVERY", 1)  # a minute passes between two otherwise
    replica, model = rig.start()
    rig.attached(replica, auto_follow=True)
    rig.versions.sparse(1)
    settled(replica, lambda status: status["prepared"] == 1)
    before = replica.status()["stream_id"]
    rig.versions.restart(0)
    rig.versions.sparse(2)
    rig.versions.sparse(3)
    settled(replica, lambda status: status["stream_id"] != before and status["prepared"] == 2)
    assert update(replica, 2) is None
    assert rig.same(model, 2)


def test_a_damaged_part_leaves_the_engine_as_it_was(rig: Rig, tmp_path: Path) -> None:
    replica, model = rig.start()
    rig.attached(replica)
    rig.versions.sparse(1)
    (part,) = (tmp_path / "stream" / "parts").rglob("*.safetensors")
    part.chmod(0o644)
    bits = bytearray(part.read_bytes())
    bits[-3] ^= 1
    part.write_bytes(bits)
    replica.prepare({"version": 1})
    status = settled(replica, lambda status: status["prepared"] == 1)
    assert status["error"] is not None
    assert (status["version"], status["ready"]) == (0, True)
    error = update(replica, 1)
    assert error is not None
    assert status["error"]["message"] in error["message"], "why it is not prepared"
    assert rig.same(model, 0)


def test_a_stream_that_is_not_there(rig: Rig, tmp_path: Path) -> None:
    replica, _ = rig.start()
    replica.init({"stream": str(tmp_path / "nothing")})
    status = settled(replica, lambda _: False)
    assert (status["state"], status["error"]["type"]) == ("failed", "ObjectNotFound")
    assert "nothing" in str(update(replica, 1))
    assert rig.attached(replica)["ready"], "another init is the way out"


def test_a_stream_of_another_model(rig: Rig, tmp_path: Path) -> None:
    """F11, F59: other shapes."""
    other = tmp_path / "other"
    state, dtypes = read_checkpoint(rig.base)
    from tests.vllm.tiny import write_weights

    other.mkdir()
    write_weights(other, state | {"layers.0.scale": np.zeros(9, np.uint16)}, dtypes)
    with Versions(other, tmp_path / "other stream") as versions:
        replica, _ = rig.start()
        replica.init({"stream": versions.url})
        status = settled(replica, lambda _: False)
    assert status["error"]["type"] == "BaseMismatch"
    assert "layers.0.scale" in status["error"]["message"]


def test_a_server_with_other_weights_is_refused_unless_it_shall_reload(rig: Rig, tmp_path: Path) -> None:
    """The host has the right copy already, so that only the live weights tell."""
    right, _ = rig.start()
    rig.attached(right)
    wrong, model = rig.start(write_toy_checkpoint(tmp_path / "wrong", seed=1))
    wrong.init({"stream": rig.versions.url, "base": str(rig.base)})
    status = settled(wrong, lambda _: False)
    assert (status["attached"], status["error"]["type"]) == (False, "BaseMismatch")
    assert 'mode "reload"' in status["error"]["message"]
    status = rig.attached(wrong, base=str(rig.base), mode="reload")
    assert (status["version"], status["ready"]) == (None, False)
    rig.prepared(wrong, 0)
    assert update(wrong, 0) is None
    assert rig.same(model, 0)
    assert wrong.status()["ready"]


def test_init_again_starts_over_and_shutdown_lets_go(rig: Rig) -> None:
    replica, _ = rig.start()
    first = rig.attached(replica)
    assert rig.attached(replica)["last_attach"] == first["last_attach"], "the same request is no work"
    rig.attached(replica, timeout_s=TIMEOUT_S + 1)
    replica.start()
    replica.init({"stream": rig.versions.url})
    assert "in progress" in replica.outcome()["error"]["message"]
    replica.finish()
    replica.close()
    assert replica.status()["state"] == "new"
    assert rig.attached(replica)["ready"], "vLLM may shut a trainer's connection down and get a new one"


def fail() -> None:
    raise RuntimeError("in the middle")
