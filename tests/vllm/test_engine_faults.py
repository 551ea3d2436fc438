"""The state machine of one rank, without vLLM: failures in the middle of an update, and what is left."""

from __future__ import annotations

import threading

from tests.vllm.rig import TIMEOUT_S, Rig, settled, update
from torch_delta import crashpoints


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


def fail() -> None:
    raise RuntimeError("in the middle")
