"""What the examples need besides a training loop: a tiny checkpoint made on the spot, and real text.

In your own script the checkpoint is `"Qwen/Qwen3-8B"` or a folder, and the batches are yours.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHAPE = (4, 64)  # sequences, tokens


def checkpoint(folder: str) -> str:
    """Make a small Qwen3 in bf16 at `folder`, unless it is there; every rank calls this, rank 0 makes it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _make(Path(folder))
    if dist.is_initialized():
        dist.barrier()
    return folder


def _make(path: Path) -> None:
    if path.exists():
        return
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,  # the tokens are bytes
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def batches(num_batches: int, rank: int = 0, world_size: int = 1) -> Iterator[torch.Tensor]:
    """Bytes of the language reference that `help()` shows, `[4, 64]` int64 each; every rank gets other ones."""
    text = torch.tensor(list("".join(topics[name] for name in sorted(topics)).encode()))
    batch_numel = _SHAPE[0] * _SHAPE[1]
    for step in range(num_batches):
        start = (step * world_size + rank) * batch_numel
        yield text[start : start + batch_numel].reshape(_SHAPE)
