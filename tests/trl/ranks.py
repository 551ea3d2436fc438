"""What each rank of a distributed trainer does in the tests, in a process of its own; see tests/_dist.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def train(
    rank: int,
    *,
    model: str,
    out: str,
    stream: str,
    url: str,
    sharded: bool = True,
    kill_after_first_step: int | None = None,
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

    Returns:
        What happened, and which error ended it.
    """
    _prepare(rank, sharded=sharded)
    import numpy as np
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from tests.trl import oracle
    from tests.trl.trainers import async_trainer
    from torch_delta.errors import TorchDeltaError
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model, fleet=FleetConfig(status_timeout_s=10.0))
    trainer = async_trainer(Path(model), Path(out) / f"out-{rank}", sync, url=url, max_steps=3)
    steps: list[int] = []
    said: list[list[list[int]]] = []

    def see(step: int, live: Any) -> None:
        steps.append(step)
        bits = oracle.served_bits(trainer.accelerator.unwrap_model(live))
        if rank == 0:
            said.append(oracle.ask(url))
            np.savez(Path(out) / f"at-{step}.npz", **bits)
            if step == 1 and kill_after_first_step is not None:
                os.killpg(kill_after_first_step, signal.SIGKILL)
        dist.barrier()

    oracle.after_sync(trainer, see)
    error: TorchDeltaError | None = None
    try:
        trainer.train()
    except TorchDeltaError as caught:
        error = caught
    return {
        "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        "steps": steps,
        "greedy": said,
        "streamed": len(list(trainer._streaming_iter())),
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else str(error),
    }


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
        _shard_on_cpus()
    from tests.vllm.engines import prepare_environment

    prepare_environment()


def _shard_on_cpus() -> None:
    """Accelerate asks for FSDP on accelerators only, and forgets it elsewhere; FSDP2 itself does without."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init
