"""GRPOTrainer: replaces the synchronisation that its generation backend calls, in server and in colocate mode.

GRPOTrainer has no seam for transfers. It calls `vllm_generation.sync_weights()` on every rank when it generates and
the global step has moved, perhaps several steps after the last time; colocated engines that sleep call it whenever they
wake. That bound method is replaced. While a trainer is built, two more things need to differ, and `building` sees to
both: server mode opens an NCCL group that nobody needs, and a colocated engine must be told of our backend.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch_delta_trl.callback import SyncCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta_trl.delta_sync import DeltaSync

BACKEND = "torch_delta"


def wire(sync: DeltaSync, trainer: Any) -> None:
    """Attach at train begin, and take over `sync_weights`."""
    from trl.generation import vllm_generation

    trainer.callback_handler.callbacks.insert(0, SyncCallback(sync))
    generation = trainer.vllm_generation

    def sync_weights() -> None:
        sleeping = generation.mode == "colocate" and generation.enable_sleep_mode and generation._llm_weights_sleeping
        if sleeping:
            vllm_generation.empty_cache()  # the engine needs what the trainer's allocator holds back
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        sync.sync(lost=sleeping)

    generation.sync_weights = sync_weights


@contextlib.contextmanager
def building() -> Iterator[None]:
    """While a GRPOTrainer is built, on the thread that builds it: no NCCL group, and engines with our backend."""
    from trl.generation import vllm_client, vllm_generation

    client = vllm_client.VLLMClient
    open_group = client.init_communicator
    engine = getattr(vllm_generation, "LLM", None)  # absent where vLLM is not installed: TRL then says so itself

    def no_group(self: Any, device: Any = 0) -> None:
        """Weights do not travel this way."""
        del self, device

    client.init_communicator = no_group
    if engine is not None:
        vllm_generation.LLM = functools.partial(engine, weight_transfer_config={"backend": BACKEND})
    try:
        yield
    finally:
        client.init_communicator = open_group
        if engine is not None:
            vllm_generation.LLM = engine
