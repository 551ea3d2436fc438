"""Names and layouts against what transformers itself would save."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.capture.models import Tiny, moe
from torch_delta.capture.layout import checkpoint_layout
from torch_delta.capture.names import canonical_name, model_tensors, unwrap_model
from torch_delta.errors import CaptureError


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("module._orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.mlp.weight", "layers.0.mlp.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.bias", "layers.0.bias"),
        ("layers.module.weight", "layers.module.weight"),
        ("module", "module"),
    ],
)
def test_wrapper_segments_are_removed(raw, expected):
    """F21."""
    assert canonical_name(raw) == expected


def test_wrapped_model_has_plain_names():
    """F21: compile and activation checkpointing, whole and in part."""
    plain = Tiny(tie=False)
    expected = [item.name for item in model_tensors(plain)]
    wrapped = Tiny(tie=False)
    wrapped.up = checkpoint_wrapper(wrapped.up)
    wrapped.norm = torch.compile(wrapped.norm, backend="eager")
    assert [item.name for item in model_tensors(torch.compile(wrapped, backend="eager"))] == expected
    assert unwrap_model(torch.compile(plain, backend="eager")) is plain


def test_a_submodule_called_module_keeps_its_name():
    """`module.` in front is a wrapper's only where there is a wrapper."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2, bias=False)})
    expected = ["module.weight", "other.weight"]
    assert [item.name for item in model_tensors(model)] == expected
    assert [item.name for item in model_tensors(torch.compile(model, backend="eager"))] == expected
    assert [item.name for item in model_tensors(nn.ModuleDict({"module": model}))] == expected


def test_ties_are_one_tensor_with_two_names():
    by_name = {item.name: item for item in model_tensors(Tiny(tie=True))}
    assert by_name["embed.weight"].aliases == ("head.weight",)
    assert "head.weight" not in by_name


def test_name_collision_is_refused():
    model = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"a": nn.Linear(2, 2)}), "a": nn.Linear(2, 2)})
    with pytest.raises(CaptureError, match=r"both called 'a\.weight'"):
        model_tensors(model)


def _deepseek():
    import transformers

    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )


def _dense(tie):
    import transformers

    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=tie,
        )
    )


FAMILIES = {
    "qwen3": lambda: _dense(tie=False),
    "qwen3 tied": lambda: _dense(tie=True),
    "qwen3_moe": lambda: moe("qwen3_moe"),
    "mixtral": lambda: moe("mixtral"),
    "deepseek_v3": _deepseek,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_views_are_what_save_pretrained_writes(family, tmp_path):
    """F11, F53, F57, F61, F62: names, shapes and every value, from files transformers wrote."""
    from safetensors.torch import load_file

    model = FAMILIES[family]()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 1000 * number)
    model.save_pretrained(tmp_path)
    saved = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    tensors = [item for item in model_tensors(model) if item.is_persistent]
    layout = checkpoint_layout(model, tensors)
    live = {item.name: item.tensor.detach() for item in tensors}
    assert not layout.unmapped
    assert layout.views.keys() == saved.keys()
    for name, view in layout.views.items():
        flat = live[view.source].reshape(-1)
        assert torch.equal(flat.as_strided(view.shape, view.strides, view.offset), saved[name]), name
    assert bool(layout.aliases) == (family == "qwen3 tied")
    if family == "deepseek_v3":  # F23
        assert any(name.endswith("e_score_correction_bias") for name in layout.views)


def test_layouts_that_are_not_views_are_reported(monkeypatch):
    """A conversion that computes new values cannot be published from the parameter's changes."""
    import transformers.core_model_loading as loading

    model = _dense(tie=False)
    monkeypatch.setattr(loading, "revert_weight_conversion", lambda _, state: {n: t + 1 for n, t in state.items()})
    layout = checkpoint_layout(model, model_tensors(model))
    assert not layout.views
    assert "is computed from it" in layout.unmapped["model.norm.weight"]


def test_conversions_that_fail_or_lose_elements_are_reported(monkeypatch):
    import transformers.core_model_loading as loading

    model = _dense(tie=False)
    monkeypatch.setattr(loading, "revert_weight_conversion", lambda _, state: {n: t[:3] for n, t in state.items()})
    found = checkpoint_layout(model, model_tensors(model)).unmapped["model.norm.weight"]
    assert found == "its checkpoint tensors cover 3 of its 16 elements"

    def fail(*_):
        raise KeyError("no such weight")

    monkeypatch.setattr(loading, "revert_weight_conversion", fail)
    found = checkpoint_layout(model, model_tensors(model)).unmapped["model.norm.weight"]
    assert found == "transformers could not revert its layout (KeyError: 'no such weight')"


def test_two_sources_of_one_checkpoint_tensor_are_refused(monkeypatch):
    import transformers.core_model_loading as loading

    model = _dense(tie=False)
    monkeypatch.setattr(loading, "revert_weight_conversion", lambda _, state: dict.fromkeys("w", *state.values()))
    with pytest.raises(CaptureError, match=r"checkpoint tensor 'w' would come from both '\S+' and '\S+'"):
        checkpoint_layout(model, model_tensors(model))
