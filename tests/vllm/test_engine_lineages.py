"""The state machine of one rank, without vLLM: a stream that another one continues."""

from __future__ import annotations

import pytest

from tests.vllm.rig import Rig, settled, update
from torch_delta.store import open_store
from torch_delta.stream import Stream
from torch_delta.stream.lineages import walk


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
