"""Real vLLM on CPU: engines in this process, for most tests, with their parameters at hand. Needs vLLM to be used.

`Engine` is one `LLM`. Several may live at a time; each holds its KV cache (`KV_CACHE_BYTES`) until it is closed. All
run in this process (no EngineCore process), so that a test can look at the model, and start in two seconds once vLLM is
imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from tests.vllm.tiny import Bits

KV_CACHE_BYTES = 32 << 20
MAX_MODEL_LEN = 256
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine is shared with other ranks and servers of the same test
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every vLLM that a test starts is told, in this process and in others."""
PROMPTS = ([3, 17, 42, 99, 7, 8, 200, 5], [250, 1, 1, 1, 30, 31], [77])
"""Prompts, as tokens, for which outputs are compared."""


_living: set[int] = set()


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported. Idempotent."""
    os.environ.update(ENVIRONMENT)


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Engine arguments for a tiny checkpoint; `options` are arguments of vLLM's `LLM` and win."""
    return {
        "model": str(folder),
        "dtype": "auto",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": True,
    } | options


class Engine:
    """One vLLM in this process; a context manager.

    Args:
        folder: checkpoint to serve.
        delta: whether our backend is selected (`--weight-transfer-config '{"backend": "torch_delta"}'`).
        options: see `arguments`.
    """

    def __init__(self, folder: Path, *, delta: bool = False, **options: Any) -> None:
        prepare_environment()
        if delta:
            options = {"weight_transfer_config": {"backend": "torch_delta"}} | options
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's and its dependencies' own
            from vllm import LLM

            self.llm: Any = LLM(**arguments(folder, **options))
        _living.add(id(self))

    @property
    def worker(self) -> Any:
        """vLLM's worker (of rank 0)."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def model(self) -> nn.Module:
        """The live model (of rank 0)."""
        return self.worker.get_model()

    def parameters(self) -> dict[str, Bits]:
        """Copies of the bits of every live parameter and buffer (rank 0), by runtime name, as bytes in memory order."""
        return live_bits(self.model)

    def greedy(self, prompts: Sequence[Sequence[int]] = PROMPTS, *, num_tokens: int = 24) -> list[list[int]]:
        """Tokens that greedy decoding appends to each prompt; exactly `num_tokens` of them."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Shut the engine down and free its memory. Idempotent."""
        llm, self.llm = self.llm, None
        if llm is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _living.discard(id(self))
                # Shutting down also destroys torch.distributed's groups, which the other engines of this process share.
                keep = "vllm.v1.engine.core.cleanup_dist_env_and_memory"
                with mock.patch(keep) if _living else contextlib.nullcontext():
                    llm.llm_engine.engine_core.shutdown()
                del llm
                gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def live_bits(model: nn.Module) -> dict[str, Bits]:
    """Copies of the bits of every parameter and buffer of a module, by runtime name, as flat uint8."""
    import torch

    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        held = tensor.detach().contiguous()
        found[name] = held.reshape(-1).view(torch.uint8).cpu().numpy().copy()
    return found


def differing(ours: dict[str, Bits], theirs: dict[str, Bits]) -> list[str]:
    """One line per runtime tensor that is missing on a side or differs in any bit."""
    found = [f"only one side has {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].shape != theirs[name].shape:
            found.append(f"{name}: {ours[name].size} bytes against {theirs[name].size}")
        elif not np.array_equal(ours[name], theirs[name]):
            found.append(f"{name}: {np.count_nonzero(ours[name] != theirs[name])} bytes differ")
    return found
