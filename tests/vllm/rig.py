"""One rank on a stream of its own, without vLLM: a real stream, a real working copy, a toy model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.vllm.stand_ins import Toy
from torch_delta.store import Backoff, poll
from torch_delta.vllm.config import Operator
from torch_delta.vllm.ranks import Solo
from torch_delta.vllm.replica import Replica
from torch_delta.vllm.routing import check_summaries

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.tiny import Versions

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
