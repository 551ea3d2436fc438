"""The state machine of one rank, without vLLM: versions as they come, by index writes and by reloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.rig import TIMEOUT_S, Rig, settled, update
from tests.vllm.tiny import Versions

if TYPE_CHECKING:
    from pathlib import Path


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


def test_the_operator_may_name_the_stream(tmp_path: Path, toy_base: Path) -> None:
    with Versions(toy_base, tmp_path / "stream") as versions:
        rig = Rig(tmp_path, toy_base, versions, environment={"TORCH_DELTA_STREAM": versions.url})
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
