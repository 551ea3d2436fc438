"""The weight transfer engine that vLLM builds in each worker for SkyRL's `delta` backend: SkyRL's calls, our `Replica`.

    /init_weight_transfer_engine ──► init_transfer_engine     the stream is followed from now on
    /fetch_weights               ──► fetch_weights            prepared once per host, before the pause
    /start_weight_update, /update_weights, /finish_weight_update ──► index writes, or a reload

Imports vLLM, so that only the factory, which knows this module by name, loads it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from torch_delta.errors import RequestRefused, TorchDeltaError
from torch_delta.store.waiting import Backoff, poll
from torch_delta.vllm import plugin, versions
from torch_delta.vllm.config import Operator
from torch_delta.vllm.engine import crew_of, served_name
from torch_delta.vllm.model import ServedModel
from torch_delta.vllm.records import Failure
from torch_delta.vllm.replica import Replica
from torch_delta.vllm.routing import check_summaries
from torch_delta_skyrl.requests import fetch_version, init_request, update_request

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

_LOOK = Backoff(first_s=0.002, most_s=0.01)  # a look takes microseconds, and a small model 50 ms to prepare
_PREPARING = frozenset({"init", "attach", "prepare"})
_EXTRA_S = 60.0  # a preparation has a deadline of its own; this one only ends a wait for a thread that died


class ReceiverEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc, unused-ignore]
    """Backend ``delta`` of SkyRL, by patches where they are proved.

    No request raises in a worker: the engine core asks how it went and raises there (`torch_delta.vllm.supervisor`).

    Args:
        config: of the backend; its name is all there is.
        vllm_config: of the engine.
        device: of this worker.
        model: of this worker, loaded.

    Raises:
        TorchDeltaError: a vLLM that this release does not know.
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        versions.check_supported()
        self.replica = SkyrlReplica(
            crew_of(vllm_config),
            ServedModel(model, vllm_config, device),
            served_name(vllm_config.model_config),
            check_summaries,
            operator=operator(),
            cpus=plugin.cpus(),
        )

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Leave a request as it came: what raises here raises in a worker."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Follow the stream of a trainer; it need not exist yet."""
        self.replica.init(init_request(init_info))

    def fetch_weights(self, target_version: int, sync_dir: str | None = None, uri: str | None = None) -> dict[str, Any]:
        """Bring this host's checkpoint to a version and plan its writes; live weights are not touched.

        Args:
            target_version: to prepare.
            sync_dir: of the trainer; must be the stream that is followed.
            uri: of the version, as SkyRL's clients pass it on; its stream must be the one that is followed.

        Returns:
            `status` ``"ok"`` with seconds and bytes, or ``"error"`` with the failure, which the engine core raises.
        """
        started_s = time.perf_counter()
        try:
            version = fetch_version(target_version, sync_dir, uri, self.replica.stream)
            self._prepare(version)
        except TorchDeltaError as error:
            failure = self.replica.standing.fail("prepare", error)
            return {"status": "error", "target_version": target_version, "error": failure.to_json()}
        stats = dict(self.replica.standing.reports["last_prepare"] or {})
        stats["total_s"] = time.perf_counter() - started_s
        return {"status": "ok", "target_version": version, "stats": stats}

    def start_weight_update(self) -> None:
        """Open an update session."""
        self.replica.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring the live weights to the version that was fetched."""
        self.replica.update(update_request(update_info))

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """As `update_weights`; vLLM declares it abstract."""
        self.update_weights(update_info)

    def finish_weight_update(self) -> None:
        """Close the update session."""
        self.replica.finish()

    def shutdown(self) -> None:
        """End of the worker, or of a trainer's connection: stop following."""
        self.replica.close()

    def _prepare(self, version: int) -> None:
        standing = self.replica.standing
        settings = standing.settings
        if settings is None:
            raise RequestRefused("fetch_weights before init_weight_transfer_engine: this engine follows no stream")
        answer = self.replica.prepare({"version": version})
        if not answer["accepted"]:
            raise Failure.from_json(answer["error"]).error()

        def look() -> Failure | bool | None:
            with standing.lock:
                if standing.version == version or version in standing.prepared:
                    return True
                error = standing.error  # one of an update that failed before says nothing of this version
                return error if error is not None and error.phase in _PREPARING else None

        found = poll(
            look,
            phase=f"prepare version {version}",
            peer=settings.stream,
            timeout_s=settings.timeout_s + _EXTRA_S,
            backoff=_LOOK,
        )
        if isinstance(found, Failure):
            raise found.error()


class SkyrlReplica(Replica):
    """A replica whose prefix cache SkyRL looks after: its trainer resets it inside the pause, if it is to be reset."""

    @property
    def stream(self) -> str | None:
        """The stream that is followed."""
        settings = self.standing.settings
        return None if settings is None else settings.stream

    def outcome(self) -> dict[str, Any]:
        """As `Replica.outcome`, and that the engine core leaves the cache alone."""
        return {**super().outcome(), "keeps_cache": True}


def operator() -> Operator:
    """What a trainer may name: what the operator's environment says, else, as with SkyRL's own engine, any folder."""
    found = Operator.from_environment()
    allowed = found.allowed if found.allowed[1:] else (Path("/"),)
    return Operator(
        stream=None,  # a trainer names it; SkyRL's servers are always initialised by one
        base=found.base,
        checkpoint_root=found.checkpoint_root,
        allowed=allowed,
        auto_follow=False,
    )
