"""An engine in this process that follows a stream; what a trainer would ask of it, through vLLM's own offline API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_delta.store import Backoff, poll

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engines import Engine
    from tests.vllm.tiny import Versions

TIMEOUT_S = 60.0
QUICK = Backoff(first_s=0.002, most_s=0.05)


class Following:
    """A served checkpoint and the stream it follows; requests go through vLLM's own offline API."""

    def __init__(self, engine: Engine, versions: Versions) -> None:
        self.engine, self.versions = engine, versions
        self.llm = engine.llm

    def status(self) -> dict[str, Any]:
        (status,) = self.llm.collective_rpc("torch_delta_status")
        return status

    def settled(self, done: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.status()
            failed = status["error"] is not None and status["error"]["phase"] not in {"apply", "init"}
            return status if status["preparing"] is None and (failed or done(status)) else None

        found = poll(look, phase="settle", peer="the engine", timeout_s=TIMEOUT_S, backoff=QUICK)
        assert found is not None
        return found

    def init(self, **info: Any) -> dict[str, Any]:
        self.llm.init_weight_transfer_engine({"init_info": {"stream": self.versions.url} | info})
        return self.settled(lambda status: status["attached"])

    def prepare(self, version: int | None = None, **request: Any) -> dict[str, Any]:
        (reply,) = self.llm.collective_rpc("torch_delta_prepare", args=({"version": version} | request,))
        assert reply["accepted"], reply
        wanted = self.versions.version if version is None else version
        return self.settled(lambda status: status["prepared"] is not None and status["prepared"] >= wanted)

    def update(self, version: int, **info: Any) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version} | info})
        self.llm.finish_weight_update()

    def to_newest(self) -> None:
        self.prepare()
        self.update(self.versions.version)
