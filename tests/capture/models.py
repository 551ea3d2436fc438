"""Tiny models with every awkward shape: uneven, empty shards, ties, buffers, scalars, fused experts."""

from __future__ import annotations

import torch
from torch import nn


class Tiny(nn.Module):
    """Ten rows over four ranks are 3, 3, 3, 1; five are 2, 2, 1, 0; one is 1, 0, 0, 0."""

    def __init__(self, *, tie=True):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.odd = nn.Linear(8, 5)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 10, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("bias_correction", torch.zeros(5, dtype=torch.float32))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.up(self.norm(hidden)))) * self.gain
        return self.head(hidden).float().logsumexp(-1).sum() + (self.odd(hidden).float() ** 2).sum()


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 10, (3, 6), generator=generator)


def moe(kind="qwen3_moe"):
    """A random transformers MoE with fused experts in memory and one tensor per expert in the checkpoint."""
    import transformers

    common = {
        "vocab_size": 37,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **common,
            intermediate_size=24,
            moe_intermediate_size=8,
            num_experts=6,
            num_experts_per_tok=2,
            head_dim=8,
            decoder_sparse_step=1,
            tie_word_embeddings=False,
        )
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            **common, intermediate_size=8, num_local_experts=4, num_experts_per_tok=2, head_dim=8
        )
        return transformers.MixtralForCausalLM(config)
    raise ValueError(kind)
