"""Trainer ranks under SkyRL 0.3.0, which lies in a folder of its own: its own selection, worker code and client.

What cannot be had on a CPU is its FSDP worker (it needs flash-attn and CUDA), so that the extractor, which gathers a
model's tensors, is written here after its interface.
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.skyrl import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

FOLDER = Path(sys.prefix) / "skyrl-0.3.0"
"""Where scripts/install_skyrl.py unpacks it."""
SYNC = "skyrl.backends.skyrl_train.weight_sync"


def use() -> None:
    """Put it before the SkyRL of this environment; before anything of SkyRL is imported."""
    assert not any(name.partition(".")[0] == "skyrl" for name in sys.modules)
    sys.path.insert(0, str(FOLDER))
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    sys.modules.setdefault("datasets", types.ModuleType("datasets"))  # its workers' module imports it, and nothing more
    warnings.simplefilter("ignore")  # SkyRL's and its dependencies' own


def settings(base: Path, stream: str, folder: Path) -> dict[str, str]:
    """The environment of a run."""
    names = {"SYNC_DIR": stream, "BASE_MODEL_PATH": base, "LOCAL_CHECKPOINT_DIR": folder / "host"}
    names["PUBLISH_STAGING_DIR"] = folder / "staging"
    return {f"TORCH_DELTA_SKYRL_{name}": str(value) for name, value in names.items()}


def extractor(model: Any) -> Any:
    """A `WeightExtractor` of an FSDP2 model."""
    from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightExtractor
    from torch.distributed.tensor import DTensor

    class Gathering(WeightExtractor):
        def extract_weights(self, dtype: torch.dtype) -> Iterator[WeightChunk]:
            for name, held in model.state_dict().items():
                whole = (held.full_tensor() if isinstance(held, DTensor) else held).detach().to(dtype).contiguous()
                yield WeightChunk(names=[name], dtypes=[str(dtype)], shapes=[list(whole.shape)], tensors=[whole])

        def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list[Any]]:
            held = model.state_dict()
            word = str(dtype).rpartition(".")[2]
            return {
                "names": list(held),
                "dtype_names": [word] * len(held),
                "shapes": [list(tensor.shape) for tensor in held.values()],
            }

    return Gathering()


def sender_rounds(rank: int, *, base: str, stream: str, url: str, folder: str, num_rounds: int, seed: int) -> Any:
    """Rounds of a sharded trainer that first trains a step, with what 0.3.0's worker and driver do around a send.

    Args:
        rank: of the trainer.
        base: checkpoint.
        stream: `sync_dir`.
        url: of the one server.
        folder: for the model as it is after the last round.
        num_rounds: how many versions are sent.
        seed: of the training.
    """
    os.environ.update(settings(Path(base), stream, Path(folder)))
    use()
    import torch

    import torch_delta_skyrl

    torch_delta_skyrl.register()
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.worker import Worker
    from skyrl.train.config.config import InferenceEngineConfig

    model = ranks.sharded(Path(base))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = InferenceEngineConfig(weight_sync_backend="delta")
    placement = types.SimpleNamespace(colocate_all=False)
    worker = types.SimpleNamespace(cfg=types.SimpleNamespace(placement=placement))
    found: dict[str, Any] = {"versions": [], "changed": []}

    async def run() -> None:
        client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)
        await Worker.init_weight_sync_state(worker, client, config)
        weights = extractor(model)
        for number in range(num_rounds):
            ranks.train(model, optimizer, seed + number)
            if rank == 0:
                await client.pause_generation()
            torch.distributed.barrier()
            await worker._weight_transfer_sender.send_chunks(
                weights.extract_weights(torch.bfloat16), weight_metadata=weights.get_weight_metadata(torch.bfloat16)
            )
            if rank == 0:
                await client.reset_prefix_cache(reset_running_requests=True)
                await client.resume_generation()
            found["versions"].append(worker._weight_transfer_sender.version)
            found["changed"].append(worker._weight_transfer_sender.report.num_changed)
        await client.teardown()

    asyncio.run(run())
    sender = worker._weight_transfer_sender
    found["owned"] = sum(item.box.numel for item in sender._publisher._publisher._source.owned)
    found["strategy"] = worker._transfer_strategy_cls.__module__
    found["release"] = torch_delta_skyrl.contract.installed()
    ranks.write_gathered(model, Path(folder) / "wanted", rank=rank)
    sender.teardown()
    return found


def selections(_rank: int) -> dict[str, Any]:
    """What 0.3.0's selectors answer with our strategy offered, also where one is held by name already."""
    use()
    from skyrl.backends.skyrl_train.inference_servers import utils
    from skyrl.backends.skyrl_train.weight_sync import get_transfer_strategy_cls

    before = get_transfer_strategy_cls("delta", False).__name__
    import torch_delta_skyrl
    from torch_delta.errors import TorchDeltaError

    torch_delta_skyrl.register()
    torch_delta_skyrl.register()
    import skyrl.backends.skyrl_train.weight_sync as chosen

    torch_delta_skyrl.registering.contract.check_seams()
    refused = []
    for ask in (
        lambda: chosen.get_transfer_strategy_cls("delta", True),
        lambda: utils.get_transfer_strategy("delta", False),
    ):
        try:
            ask()
        except TorchDeltaError as error:
            refused.append(str(error))
    return {
        "before": before,
        "delta": chosen.get_transfer_strategy_cls("delta", False).__name__,
        "nccl": [utils.get_transfer_strategy("nccl", True), chosen.get_transfer_strategy_cls("nccl", True).__name__],
        "refused": refused[0],
        "own servers": refused[1],
    }
