"""Colocated vLLM: each rank's own engine, in the trainer's process, follows the stream like a server would.

Ranks of a tensor-parallel group call the same methods in the same order, which vLLM's external launcher asks for. All
engines of a host share one local checkpoint, so that a version is fetched once per host.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch_delta.errors import ApplyFailed
from torch_delta.store.waiting import Backoff, poll
from torch_delta.vllm.fleet.config import FleetConfig
from torch_delta_trl.report import Delivery

if TYPE_CHECKING:
    from collections.abc import Mapping

_PEER = "this rank's vLLM engine"


class ColocatedReceiver:
    """The engine inside TRL's `VLLMGeneration` in colocate mode.

    Args:
        generation: TRL's; its `llm` was built with our backend (`torch_delta_trl.GRPOTrainer` does).
        stream: URL.
        init_info: further fields for the engine's initialisation.
        config: its `prepare_timeout_s` and `mode` are used; None is the defaults.
    """

    on_every_rank = True

    def __init__(
        self, generation: Any, stream: str, init_info: Mapping[str, object] | None, *, config: FleetConfig | None = None
    ) -> None:
        limits = config if config is not None else FleetConfig()
        self._generation = generation
        self._mode = limits.mode
        self._init_info = {**(init_info if init_info is not None else {}), "stream": stream}
        self._told = False
        self.timeout_s = limits.prepare_timeout_s

    @property
    def asleep(self) -> bool:
        """See `Receivers.asleep`."""
        return bool(self._generation.enable_sleep_mode and self._generation._llm_weights_sleeping)

    def update(self, version: int, *, lost: bool = False) -> Delivery:
        """See `Receivers.update`. Nothing is paused: the trainer's own thread drives the engine."""
        started_s = time.perf_counter()
        if not self._told:
            self._call("init_weight_transfer_engine", dict(self._init_info))
            self._told = True
        self._prepare(version)
        prepared_s = time.perf_counter()
        if lost or any(worker["version"] != version for worker in self._status()):
            self._call("start_weight_update")
            self._call("update_weights", {"version": version, "mode": "reload" if lost else self._mode})
            self._call("finish_weight_update")  # which also forgets what was cached with older weights
        return Delivery(
            prepare_s=prepared_s - started_s,
            pause_s=time.perf_counter() - prepared_s,
            num_servers=1,
            num_behind=0,
            oldest_version=version,
        )

    def close(self) -> None:
        """See `Receivers.close`."""

    def _prepare(self, version: int) -> None:
        for answer in self._call("torch_delta_prepare", {"version": version, "timeout_s": self.timeout_s}):
            if answer.get("accepted") is not True:
                raise _refused("prepare", answer.get("error"))

        def prepared() -> bool | None:
            workers = self._status()
            if all(worker["prepared"] is not None and worker["prepared"] >= version for worker in workers):
                return True
            for worker in workers:
                if worker["preparing"] is None and worker["error"] is not None:
                    raise _refused("prepare", worker["error"])
            return None

        poll(
            prepared,
            phase=f"prepare version {version}",
            peer=_PEER,
            timeout_s=self.timeout_s,
            backoff=Backoff(first_s=0.005, most_s=0.1),
            transient=(),
        )

    def _status(self) -> list[Mapping[str, Any]]:
        return self._call("torch_delta_status")

    def _call(self, method: str, *arguments: Mapping[str, object]) -> list[Any]:
        replies: list[Any] = self._generation.llm.collective_rpc(method, args=arguments)
        return replies


def _refused(phase: str, error: Mapping[str, Any] | None) -> ApplyFailed:
    said = error if error is not None else {}
    return ApplyFailed(
        f"{phase}: {_PEER}: {said.get('type', 'error')}: {said.get('message', 'no explanation')}",
        phase=phase,
        worker_error=dict(said),
    )
