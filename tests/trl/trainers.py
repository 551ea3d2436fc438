"""Trainers for tests: real TRL ones on a CPU, with a rollout worker in this process that makes samples up."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = (2, 22, 4, 28, 3)
NUM_TOKENS = 8
TARGETS = ["q_proj", "down_proj"]
"""Layers with an adapter, where tests have any."""


class MadeUpRollouts:
    """TRL's RolloutWorkerProtocol: groups of four samples with random tokens and advantages, as many as are wanted."""

    def __init__(self, *, seed: int = 0) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=16)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []
        self._loop_kwargs = {"dataset_start_index": 0}  # where TRL's own worker has its place in the prompts
        self._rng = np.random.default_rng(seed)
        self._version = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def _make(self) -> None:
        group = 0
        while not self._stop.is_set():
            for _ in range(4):
                self._put(self._sample(group))
            group += 1

    def _put(self, sample: Any) -> None:
        while not self._stop.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=0.1)
            except queue.Full:
                continue
        return None

    def _sample(self, group: int) -> Any:
        from trl.experimental.async_grpo.async_grpo_trainer import RolloutSample

        tokens = [*PROMPT, *self._rng.integers(4, 40, NUM_TOKENS).tolist()]
        mask = [0] * len(PROMPT) + [1] * NUM_TOKENS
        values = {
            "prompt": [{"role": "user", "content": "say"}],
            "completion": [{"role": "assistant", "content": "x"}],
            "input_ids": torch.tensor(tokens),
            "completion_mask": torch.tensor(mask),
            "old_log_probs": torch.tensor([-3.5 * one for one in mask]),
            "advantage": float(self._rng.normal()),
            "group_id": group,
            "model_version": self._version,
            "metrics": {},
            "enqueued_at": time.time(),
        }
        known = {field.name for field in dataclasses.fields(RolloutSample)}
        return RolloutSample(**{name: value for name, value in values.items() if name in known})

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        del stale_after_s


def no_reward(completions: list[Any], **_: object) -> list[float]:
    """The made-up samples carry their advantages."""
    return [0.0] * len(completions)


def adapter(**options: Any) -> Any:
    """A `peft_config`: plain LoRA, unless `options` say otherwise."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options)


def async_trainer(
    model: Path,
    out: Path,
    sync: Any,
    *,
    url: str,
    max_steps: int = 3,
    callbacks: list[Any] | None = None,
    kind: Any = None,
    adapter: Any = None,
    **options: Any,
) -> Any:
    """An AsyncGRPOTrainer of `torch_delta_trl` with made-up rollouts.

    Args:
        model: folder.
        out: folder.
        sync: DeltaSync.
        url: of the server.
        max_steps: optimizer steps.
        callbacks: more of them.
        kind: a subclass to use instead.
        adapter: `peft_config` of the trainer.
        options: of the config.
    """
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from grpo.cpu import let_async_grpo_run
    from grpo.reward import prompts
    from torch_delta_trl import AsyncGRPOTrainer

    let_async_grpo_run()
    chosen: dict[str, Any] = {
        "output_dir": str(out),
        "vllm_server_base_url": url,
        "max_steps": max_steps,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "token_budget": 64,
        "max_staleness": 1000,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return (kind if kind is not None else AsyncGRPOTrainer)(
        str(model),
        args=AsyncGRPOConfig(**chosen | options),
        train_dataset=prompts(64),
        reward_funcs=no_reward,
        rollout_worker=MadeUpRollouts(),
        callbacks=callbacks,
        peft_config=adapter,
        delta_sync=sync,
    )


def grpo_trainer(model: Path, out: Path, sync: Any, *, max_steps: int = 3, adapter: Any = None, **options: Any) -> Any:
    """A GRPOTrainer of `torch_delta_trl`, generating with vLLM: a server by `vllm_server_base_url`, else colocated."""
    from trl import GRPOConfig

    from grpo.reward import prompts, vowels
    from torch_delta_trl import GRPOTrainer

    chosen: dict[str, Any] = {
        "output_dir": str(out),
        "use_vllm": True,
        "vllm_mode": "server" if "vllm_server_base_url" in options else "colocate",
        "max_steps": max_steps,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "vllm_max_model_length": 64,
        "vllm_gpu_memory_utilization": 0.1,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        str(model),
        args=GRPOConfig(**chosen | options),
        train_dataset=prompts(64),
        reward_funcs=vowels,
        peft_config=adapter,
        delta_sync=sync,
    )
