"""Several ranks of one engine, as threads with a store between them: all commit, or all undo."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.vllm.stand_ins import DictStore, Toy, write_toy_checkpoint
from tests.vllm.tiny import Versions
from torch_delta.errors import DeadlineExceeded
from torch_delta.store import Backoff, poll
from torch_delta.vllm import applying
from torch_delta.vllm.config import Operator
from torch_delta.vllm.ranks import StoreCrew
from torch_delta.vllm.replica import Replica
from torch_delta.vllm.routing import check_summaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIMEOUT_S = 30.0
QUICK = Backoff(first_s=0.002, most_s=0.02)


class Engine:
    """Two ranks, each with half of the rows of every tensor; requests reach both at once, as vLLM's do."""

    def __init__(self, base: Path, versions: Versions, operator: Operator, **toy: Any) -> None:
        store = DictStore()
        self.versions = versions
        self.models = [Toy(base, rank=rank, size=2, **toy) for rank in range(2)]
        self.ranks = [
            Replica(StoreCrew(store, rank, 2), self.models[rank], str(base), check_summaries, operator=operator)
            for rank in range(2)
        ]
        self._pool = ThreadPoolExecutor(2)

    def call(self, work: Callable[[Replica], Any]) -> list[Any]:
        return list(self._pool.map(work, self.ranks, timeout=TIMEOUT_S))

    def settled(self, done: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]] | None:
            found = [rank.status() for rank in self.ranks]
            idle = all(status["preparing"] is None for status in found)
            failed = all(status["error"] and status["error"]["phase"] != "apply" for status in found)
            return found if idle and (failed or all(map(done, found))) else None

        found = poll(look, phase="settle", peer="the ranks", timeout_s=TIMEOUT_S, backoff=QUICK)
        assert found is not None
        return found

    def attached(self) -> list[dict[str, Any]]:
        self.call(lambda rank: rank.init({"stream": self.versions.url, "timeout_s": TIMEOUT_S}))
        return self.settled(lambda status: status["attached"])

    def prepared(self, version: int) -> list[dict[str, Any]]:
        said = self.call(lambda rank: rank.prepare({"version": version}))
        asked = max(reply["request"] for reply in said)  # an earlier preparation of the version is no answer to it
        return self.settled(lambda status: status["answered"] >= asked and status["prepared"] == version)

    def update(self, version: int, **request: Any) -> list[dict[str, Any] | None]:
        def one(rank: Replica) -> dict[str, Any] | None:
            rank.start()
            rank.update({"version": version} | request)
            error = rank.outcome()["error"]
            rank.finish()
            return error

        return self.call(one)

    def same(self, version: int) -> bool:
        wanted = self.versions.bits(version)
        return all(
            np.array_equal(model.values[name], bits[model.rows(bits.shape)])
            for model in self.models
            for name, bits in wanted.items()
        )

    def close(self) -> None:
        self.call(lambda rank: rank.close())
        self._pool.shutdown()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    base = write_toy_checkpoint(tmp_path / "base")
    operator = Operator.from_environment(
        {"TORCH_DELTA_CHECKPOINT_ROOT": str(tmp_path / "root"), "TORCH_DELTA_ALLOWED_PATHS": str(tmp_path)}
    )
    with Versions(base, tmp_path / "stream") as versions:
        engine = Engine(base, versions, operator)
        try:
            yield engine
        finally:
            engine.close()


def test_ranks_attach_prepare_and_commit_together(engine: Engine) -> None:
    assert [status["version"] for status in engine.attached()] == [0, 0]
    engine.versions.sparse(1)
    engine.versions.special(2)
    prepared = engine.prepared(2)
    assert [status["plan"] for status in prepared] == ["patch", "patch"]
    assert sum(status["last_prepare"]["stored_bytes"] > 0 for status in prepared) == 1, "one rank fetched for both"
    assert engine.update(2) == [None, None]
    assert engine.same(2)
    assert [rank.status()["version"] for rank in engine.ranks] == [2, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_makes_all_of_them_undo(engine: Engine, victim: int) -> None:
    engine.attached()
    engine.versions.sparse(1)
    engine.prepared(1)
    engine.models[victim].faults["write"] = OSError("no memory")
    # It raised something that does not say `undone`: nobody knows what it wrote.
    errors = engine.update(1)
    assert all(error is not None and "no memory" in error["message"] for error in errors)
    assert [rank.status()["state"] for rank in engine.ranks] == ["dirty", "dirty"]
    assert "rollback" in engine.models[1 - victim].events
    assert engine.same(0)
    assert [status["plan"] for status in engine.prepared(1)] == ["reload", "reload"]
    assert engine.update(1) == [None, None]
    assert engine.same(1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_undid_itself_keeps_the_engine_clean(engine: Engine, victim: int) -> None:
    engine.attached()
    engine.versions.sparse(1)
    engine.prepared(1)
    live = engine.ranks[victim].standing.live
    assert live is not None
    live.forget()  # its plan is stale now
    errors = engine.update(1)
    assert all(error is not None and error["facts"]["undone"] is True for error in errors)
    assert engine.same(0)
    assert all(rank.status()["ready"] for rank in engine.ranks)
    engine.prepared(1)


def test_a_request_that_one_rank_must_refuse_is_refused_by_all(engine: Engine) -> None:
    engine.attached()
    engine.versions.sparse(1)
    engine.prepared(1)
    engine.ranks[1].standing.prepared.clear()
    errors = engine.update(1)
    assert all(error is not None and "prepare it first" in error["message"] for error in errors)
    assert engine.same(0)
    assert not any("write" in model.events for model in engine.models)


def test_a_preparation_that_fails_on_one_rank_fails_on_all(engine: Engine) -> None:
    engine.attached()
    engine.versions.sparse(1)
    engine.models[1].faults["plan"] = OSError("no room")
    for status in engine.prepared(1):
        assert "no room" in status["error"]["message"]
        assert status["prepared"] == 0
        assert status["ready"]
    engine.call(lambda rank: rank.prepare({"version": 1}))
    engine.settled(lambda status: status["prepared"] == 1)
    assert engine.update(1) == [None, None]


def test_weights_that_changed_on_one_rank_make_all_reload(engine: Engine) -> None:
    engine.attached()
    engine.models[1].values["embed.weight"][:] ^= 1
    engine.versions.sparse(1)
    assert [status["plan"] for status in engine.prepared(1)] == ["reload", "reload"]
    assert engine.update(1) == [None, None]
    assert engine.same(1)


def test_verify_adds_the_digests_of_all_ranks(engine: Engine) -> None:
    engine.attached()
    engine.call(lambda rank: rank.verify())
    assert all(status["verified_full"]["ok"] for status in engine.settled(lambda s: not s["verifying"]))
    engine.models[1].values["layers.0.scale"][0] ^= 1
    engine.call(lambda rank: rank.verify())
    for status in engine.settled(lambda status: status["error"]):
        assert status["verified_full"]["wrong"] == ["layers.0.scale"]


def test_a_rank_that_does_not_come_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.attached()
    engine.versions.sparse(1)
    engine.prepared(1)
    monkeypatch.setattr(applying, "RANKS_S", 0.2)
    alone = engine.ranks[0]
    alone.start()
    alone.update({"version": 1})
    error = alone.outcome()["error"]
    assert error is not None
    assert (error["type"], error["facts"]["peer"]) == ("DeadlineExceeded", "rank 1")
    assert alone.status()["state"] == "dirty", "it cannot know what the other one did"


def test_an_exchange_has_a_deadline_and_forgets_old_keys() -> None:
    store = DictStore()
    ranks = [StoreCrew(store, rank, 2) for rank in range(2)]
    with pytest.raises(DeadlineExceeded, match="rank 1 did not come to 'alone'"):
        ranks[0].exchange("alone", 1, timeout_s=0.05)
    for number in range(200):
        other = threading.Thread(target=ranks[1].exchange, args=(f"round {number}", -number), kwargs={"timeout_s": 5})
        other.start()
        assert ranks[0].exchange(f"round {number}", number, timeout_s=5) == [number, -number]
        other.join(5)
    assert len(store.values) <= 2 * 64
