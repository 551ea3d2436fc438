"""What each rank of a distributed trainer does in the tests, in a process of its own; see tests/_dist.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests._accelerate import is_sharded, shard_on_cpus

if TYPE_CHECKING:
    from torch_delta.testing import FaultyStore

Down = Literal["a while", "for good", "at the server"]
"""For how long, or for whom, there is no store at the second version."""
DOWN = "503 from the object store"


def train(
    rank: int,
    *,
    model: str,
    out: str,
    stream: str,
    url: str,
    sharded: bool = True,
    kill_after_first_step: int | None = None,
    down: Down | None = None,
    adapted: bool = False,
) -> dict[str, Any]:
    """Train three steps of AsyncGRPOTrainer on two ranks, with FSDP2 or DDP.

    Args:
        rank: of two.
        model: folder.
        out: folder; the weights of each step are written to it.
        stream: folder.
        url: of the server, already running.
        sharded: FSDP2, else DDP.
        kill_after_first_step: process group of the server, which rank 0 ends then.
        down: what happens to the store at the second version: to rank 1, or to the server.
        adapted: train LoRA adapters, with DDP.

    Returns:
        What happened, and which error ended it.
    """
    _prepare(rank, sharded=sharded)
    import numpy as np
    import torch.distributed as dist

    from tests.trl import oracle
    from tests.trl.trainers import adapter, async_trainer
    from torch_delta import PublishConfig
    from torch_delta.errors import TorchDeltaError
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    store = _failing(Path(stream), rank, down)
    sync = DeltaSync(
        store,
        base=model,
        server_stream=stream,
        publish=PublishConfig(num_put_attempts=3, retry_delay_s=0.01),
        fleet=FleetConfig(status_timeout_s=10.0),
    )
    options = {"adapter": adapter(), "learning_rate": 1e-2} if adapted else {}
    trainer = async_trainer(Path(model), Path(out) / f"out-{rank}", sync, url=url, max_steps=3, **options)
    steps: list[int] = []
    said: list[list[list[int]]] = []

    def see(step: int, live: Any) -> None:
        steps.append(step)
        bits = (oracle.merged_bits if adapted else oracle.served_bits)(trainer.accelerator.unwrap_model(live))
        if rank == 0:
            said.append(oracle.ask(url))
            np.savez(Path(out) / f"at-{step}.npz", **bits)
            if step == 1 and kill_after_first_step is not None:
                os.killpg(kill_after_first_step, signal.SIGKILL)
        dist.barrier()

    oracle.after_sync(trainer, see)
    error: TorchDeltaError | None = None
    with store:
        try:
            trainer.train()
        except TorchDeltaError as caught:
            error = caught
        store.assert_fired()
    return {
        "sharded": is_sharded(trainer.model),
        "steps": steps,
        "synced": None if sync.last is None else sync.last.version,
        "greedy": said,
        "streamed": len(list(trainer._streaming_iter())),
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else str(error),
    }


def _failing(stream: Path, rank: int, down: Down | None) -> FaultyStore:
    """The stream's store as one rank has it. Each rank puts one part per version; rank 0 puts the commits."""
    from torch_delta.errors import StoreUnavailable
    from torch_delta.format.keys import version_name
    from torch_delta.store import LocalStore
    from torch_delta.testing import Fault, FaultyStore
    from torch_delta.testing.faults import call, fail_before

    def taken_away() -> None:
        """After the commit of the second version: nobody can read its parts."""
        (stream / "parts" / version_name(2)).rename(stream / "taken-away")

    unavailable = fail_before(StoreUnavailable(DOWN))
    faults = {
        (1, "a while"): [Fault("put_new", "*parts*", nth=2, times=2, effect=unavailable)],
        (1, "for good"): [Fault("put_new", "*parts*", nth=2, times=None, effect=unavailable)],
        (0, "at the server"): [Fault("put_new", "*commits*", nth=2, effect=call(taken_away, after=True))],
    }
    return FaultyStore(LocalStore(stream), faults.get((rank, down), []))


def _prepare(rank: int, *, sharded: bool) -> None:
    """As `accelerate launch` would, after torch.distributed has been started over a file."""
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "ACCELERATE_USE_CPU": "true",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if sharded:
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        }
        shard_on_cpus()
    from tests.vllm.engines import prepare_environment

    prepare_environment()
