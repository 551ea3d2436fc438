"""Shapes of the models `scale_model.py` speaks about: checkpoint tensors, from the numbers in their config.json.

Names are those of their Hugging Face checkpoints as far as sizes need them; experts are one tensor each, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensors = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder as its config.json describes it; `experts` is 0 for a dense one."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    qk_norm: bool = False

    def layer(self, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Checkpoint tensors of one layer."""
        prefix = f"model.layers.{number}."
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield prefix + "self_attn.q_proj.weight", (wide, self.hidden)
        yield prefix + "self_attn.k_proj.weight", (narrow, self.hidden)
        yield prefix + "self_attn.v_proj.weight", (narrow, self.hidden)
        yield prefix + "self_attn.o_proj.weight", (self.hidden, wide)
        for norm in ("q_norm", "k_norm") if self.qk_norm else ():
            yield f"{prefix}self_attn.{norm}.weight", (self.head_dim,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (self.hidden,)
        if self.experts:
            yield prefix + "mlp.gate.weight", (self.experts, self.hidden)
        for mlp in [f"mlp.experts.{expert}." for expert in range(self.experts)] or ["mlp."]:
            yield f"{prefix}{mlp}gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}{mlp}up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}{mlp}down_proj.weight", (self.hidden, self.intermediate)

    @property
    def num_tensors(self) -> int:
        return self.layers * len(list(self.layer(0))) + (2 if self.tied else 3)

    @property
    def num_elements(self) -> int:
        in_layer = sum(prod(shape) for _, shape in self.layer(0))
        return self.layers * in_layer + (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def largest_tensor(self) -> int:
        """Elements."""
        return max(self.vocabulary * self.hidden, *(prod(shape) for _, shape in self.layer(0)))


_QWEN = {"head_dim": 128, "vocabulary": 151_936, "qk_norm": True}
MODELS = {
    model.name: model
    for model in (
        Model(name="qwen3-0.6b", hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072, tied=True, **_QWEN),
        Model(name="qwen3-8b", hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12_288, **_QWEN),
        Model(name="qwen3-32b", hidden=5120, layers=64, heads=64, kv_heads=8, intermediate=25_600, **_QWEN),
        Model(
            name="qwen3-235b-a22b",
            hidden=4096,
            layers=94,
            heads=64,
            kv_heads=4,
            intermediate=1536,
            experts=128,
            **_QWEN,
        ),
        Model(
            name="llama-405b",
            hidden=16_384,
            layers=126,
            heads=128,
            kv_heads=8,
            head_dim=128,
            intermediate=53_248,
            vocabulary=128_256,
        ),
        Model(
            name="moe-1t",
            hidden=7168,
            layers=61,
            heads=64,
            kv_heads=8,
            head_dim=128,
            intermediate=2048,
            vocabulary=163_840,
            experts=384,
        ),
    )
}
"""By name; `moe-1t` is nobody's checkpoint, but a mixture of experts of a trillion parameters of the usual form."""
