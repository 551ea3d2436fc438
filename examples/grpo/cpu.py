"""TRL's AsyncGRPOTrainer on a machine without a GPU. With a GPU nothing here is used.

It asks for two things only a GPU has: a packed attention kernel, and the peak speed of the device for its statistics.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def let_async_grpo_run() -> None:
    """Put plain PyTorch in the place of the kernel, and leave utilisation out of the statistics."""
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: PackedAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


class PackedAttention:
    """The one function of the kernel that TRL calls."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        *_: object,
        softmax_scale: float,
        **__: object,
    ) -> torch.Tensor:
        """Causal attention of each packed segment to its own keys.

        Args:
            query: [tokens, heads, head_dim].
            key: [key tokens, key heads, head_dim].
            value: like `key`.
            query_ends: [segments + 1] int32, where segments begin and end.
            key_ends: the same for keys; the last keys of a segment are its own tokens'.
            softmax_scale: factor of the scores.
        """
        repeats = query.shape[1] // key.shape[1]
        outputs = []
        for segment in range(len(query_ends) - 1):
            q = query[query_ends[segment] : query_ends[segment + 1]].transpose(0, 1)
            rows = slice(int(key_ends[segment]), int(key_ends[segment + 1]))
            k, v = (side[rows].repeat_interleave(repeats, dim=1).transpose(0, 1) for side in (key, value))
            sees = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=softmax_scale).transpose(0, 1))
        return torch.cat(outputs)
