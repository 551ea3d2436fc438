"""The state machine of one rank, without vLLM: requests, streams and versions that cannot be served."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.vllm.rig import QUICK, TIMEOUT_S, Rig, settled, update
from tests.vllm.stand_ins import write_toy_checkpoint
from tests.vllm.tiny import Versions, read_checkpoint, write_weights
from torch_delta.store import poll

if TYPE_CHECKING:
    from pathlib import Path


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
