"""SkyRL 0.3.0's seat: its two functions that choose a weight transfer strategy.

    get_transfer_strategy_cls   asked by trainers; answers with our strategy
    get_transfer_strategy       asked for the arguments of servers that 0.3.0 starts itself, which cannot receive

They are changed when SkyRL's modules are imported; nothing here imports one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch_delta.errors import RequestRefused, UnsupportedFormat
from torch_delta_skyrl import contract

if TYPE_CHECKING:
    from types import ModuleType


def offer_strategy(weight_sync: ModuleType) -> None:
    """Have both functions answer for `weight_sync_backend="delta"`, and leave other backends to SkyRL. Idempotent.

    Args:
        weight_sync: SkyRL's package of that name, loaded.
    """
    module: Any = weight_sync
    if hasattr(module, "torch_delta"):
        return
    skyrls_name, skyrls_class = module.get_transfer_strategy, module.get_transfer_strategy_cls

    def get_transfer_strategy(weight_sync_backend: str, colocate_all: bool) -> str:
        if weight_sync_backend == contract.BACKEND:
            raise UnsupportedFormat(
                f"weight_sync_backend=delta: servers of skyrl {contract.SENDERS} run on a vLLM that is too old to "
                f"follow. Start those of skyrl {contract.ENGINES} in an environment of their own, and name them by "
                "generator.inference_engine.external_proxy_url and external_server_urls",
                expected=contract.ENGINES,
            )
        return str(skyrls_name(weight_sync_backend, colocate_all))

    def get_transfer_strategy_cls(weight_sync_backend: str, colocate_all: bool) -> Any:
        if weight_sync_backend != contract.BACKEND:
            return skyrls_class(weight_sync_backend, colocate_all)
        if colocate_all:
            raise RequestRefused(
                "weight_sync_backend=delta is for servers with GPUs of their own; set "
                "trainer.placement.colocate_all=false",
                field="colocate_all",
            )
        from torch_delta_skyrl.senders import DeltaTransferStrategy

        return DeltaTransferStrategy

    module.get_transfer_strategy = get_transfer_strategy
    module.get_transfer_strategy_cls = get_transfer_strategy_cls
    module.torch_delta = True
    holder: Any = sys.modules.get(contract.SERVER_ARGUMENTS)
    if holder is not None:
        holder.get_transfer_strategy = get_transfer_strategy
