"""The weight transfer engine that vLLM builds in each worker: a thin shell around `Replica`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from torch_delta.vllm import plugin, versions
from torch_delta.vllm.model import ServedModel
from torch_delta.vllm.ranks import Crew, Solo, StoreCrew
from torch_delta.vllm.replica import Replica
from torch_delta.vllm.routing import check_summaries

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

logger = logging.getLogger("torch_delta")


class TorchDeltaEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc, unused-ignore]
    """Backend ``torch_delta``. vLLM's worker calls it; requests stay plain dicts until `Replica` has checked them.

    Args:
        config: of the backend; its name is all there is.
        vllm_config: of the engine.
        device: of this worker.
        model: of this worker, loaded.
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
        self.replica = Replica(
            crew_of(vllm_config),
            ServedModel(model, vllm_config, device),
            served_name(vllm_config.model_config),
            check_summaries,
            cpus=plugin.cpus(),
        )

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Leave a request as it came: what raises here raises in a worker."""
        return init_dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Follow a stream."""
        self.replica.init(init_info)

    def start_weight_update(self) -> None:
        """Open an update session."""
        self.replica.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring the live weights to a version; how it went is asked for by the supervisor."""
        self.replica.update(update_info)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """As `update_weights`; vLLM declares it abstract."""
        self.replica.update(update_info)

    def finish_weight_update(self) -> None:
        """Close the update session."""
        self.replica.finish()

    def shutdown(self) -> None:
        """End of the worker, or of a trainer's connection: stop following."""
        self.replica.close()


def crew_of(vllm_config: VllmConfig) -> Crew:
    """All ranks of the engine that this process belongs to."""
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1:
        return Solo()
    store = versions.prefixed_store(f"torch_delta/{parallel.data_parallel_index}/")
    return StoreCrew(store, parallel.rank, parallel.world_size)


def served_name(model_config: Any) -> str:
    """Folder or Hub id of the served model, with the revision if there is one."""
    revision = model_config.revision
    return f"{model_config.model}@{revision}" if revision else str(model_config.model)
