"""The dry run at attach: everything that does not match is named, nothing is guessed or skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.capture.models import Tiny, moe
from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.placement import Placement
from torch_delta.capture.policy import choose_mode, free_memory_bytes
from torch_delta.errors import CaptureError
from torch_delta.format.schema import Schema, TensorSpec


def schema_of(model, **changes):
    """The base a model came from: its state dict in bf16 (buffers in fp32), with some entries replaced or dropped."""
    specs = {}
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        specs[name] = TensorSpec(name, "F32" if name in buffers else "BF16", tuple(tensor.shape))
    for name, spec in changes.items():
        specs.pop(name.replace("__", "."), None)
        if spec is not None:
            specs[spec.name] = spec
    return Schema(tuple(sorted(specs.values(), key=lambda spec: spec.name)))


def attach(model, base=None, trained=None, **config):
    optimizer = torch.optim.SGD(trained if trained is not None else model.parameters(), lr=0.1)
    return Capture(optimizer, model, base, config=CaptureConfig(**config))


def test_matching_base_is_taken_as_it_is():
    model = Tiny(tie=False)
    base = schema_of(model)
    assert attach(model, base).schema == base


def test_all_unresolved_names_are_listed():
    """F61: at attach, over all names, not at the first change."""
    model = Tiny(tie=False)
    extra = {f"mtp__{n}": TensorSpec(f"mtp.{n}", "BF16", (2,)) for n in range(12)}
    base = schema_of(model, **extra)
    with pytest.raises(CaptureError, match=r"12 tensors of the base are not in the model: mtp\.0.* and 4 more") as e:
        attach(model, base)
    assert len(e.value.tensors) == 12
    capture = attach(model, base, constant=("mtp.*",))
    assert [capture.schema.tensors[index].name for index in capture.constant] == sorted(f"mtp.{n}" for n in range(12))
    assert not {item.tensor for item in capture.owned} & set(capture.constant)


def test_trained_tensor_missing_from_the_base_is_refused():
    """F11, F53: its changes would reach nobody."""
    model = Tiny(tie=False)
    base = schema_of(model, odd__weight=None)
    with pytest.raises(CaptureError, match=r"trained tensors are missing from the base: odd\.weight"):
        attach(model, base)
    assert "odd.weight" not in attach(model, base, exclude=("odd.*",), constant=("odd.bias",)).schema.by_name
    model.odd.weight.requires_grad_(False)
    attach(model, base)


def test_wrong_shape_and_dtype_are_refused():
    """F22, F56: padded vocabularies, integer bases."""
    model = Tiny(tie=False)
    with pytest.raises(CaptureError, match=r"head\.weight: the base has shape \(9, 8\), the model \(10, 8\)") as caught:
        attach(model, schema_of(model, head__weight=TensorSpec("head.weight", "BF16", (9, 8))))
    assert caught.value.expected == (9, 8)
    with pytest.raises(CaptureError, match=r"head\.weight: the base stores I8, the model trains torch\.float32"):
        attach(model, schema_of(model, head__weight=TensorSpec("head.weight", "I8", (10, 8))))


@pytest.mark.parametrize(
    "companion", ["up.weight_scale_inv", "up.weight_scale", "up.qweight", "up.weight_packed", "up.weight.absmax"]
)
def test_quantised_base_is_refused(companion):
    """F75."""
    model = Tiny(tie=False)
    with pytest.raises(CaptureError, match=f"quantised.*{companion}"):
        attach(model, schema_of(model, x=TensorSpec(companion, "F32", (1,))))


def test_blocks_with_scales_are_refused_but_scales_alone_are_not():
    model = Tiny(tie=False)
    pair = {"a": TensorSpec("e.w_blocks", "U8", (1,)), "b": TensorSpec("e.w_scales", "U8", (1,))}
    with pytest.raises(CaptureError, match="quantised"):
        attach(model, schema_of(model, **pair))
    model.register_parameter("layer_scales", nn.Parameter(torch.ones(2)))
    attach(model, schema_of(model))


def test_serving_dtypes_are_the_bases():
    """F20, F22: per tensor; fp32 stays fp32, no rounding is invented."""
    model = Tiny(tie=False)
    base = schema_of(model, norm__weight=TensorSpec("norm.weight", "F32", (8,)))
    capture = attach(model, base)
    with torch.no_grad():
        model.norm.weight[3] += 2**-20  # far below bf16 resolution
        model.up.weight[0, 0] = 1.0
    capture.collect()
    with torch.no_grad():
        model.norm.weight[3] += 2**-20
        model.up.weight[0, 0] += 2**-20
    (change,) = capture.collect().changes
    assert capture.schema.tensors[change.tensor].name == "norm.weight"
    assert change.new.dtype.itemsize == 4


def test_ties_become_aliases_whatever_the_base_lists():
    """F53: once, under the name the base has; with both names listed the second is an alias."""
    model = Tiny(tie=True)
    both = schema_of(Tiny(tie=False))
    assert attach(model, both).schema.by_name["head.weight"].alias_of == "embed.weight"
    first = attach(model, schema_of(Tiny(tie=False), head__weight=None)).schema
    assert "head.weight" not in first.by_name
    second = attach(model, schema_of(Tiny(tie=False), embed__weight=None)).schema
    assert second.by_name["head.weight"].alias_of is None
    tied = attach(model).schema
    assert tied.by_name["head.weight"].alias_of == "embed.weight"


def test_a_tie_of_the_base_that_the_model_broke_is_refused():
    tied = attach(Tiny(tie=True)).schema
    with pytest.raises(CaptureError, match=r"the base ties head\.weight, the model does not"):
        attach(Tiny(tie=False), tied)


def test_base_without_one_expert_is_refused():
    model = moe("qwen3_moe")
    full = attach(model).schema
    partial = Schema(tuple(spec for spec in full.tensors if "experts.5.up_proj" not in spec.name))
    with pytest.raises(
        CaptureError, match=r"experts\.gate_up_proj: the base lacks a part of it: .*experts\.5\.up_proj"
    ):
        attach(model, partial)


def test_optimizer_must_know_every_trained_parameter_once():
    """F44."""
    model = Tiny(tie=False)
    with pytest.raises(CaptureError, match=r"in no optimizer: odd\.weight.*freeze") as caught:
        attach(model, trained=[p for n, p in model.named_parameters() if n != "odd.weight"])
    assert caught.value.tensors == ("odd.weight",)
    with pytest.raises(CaptureError, match=r"built before fully_shard"):
        attach(model, trained=list(Tiny(tie=False).parameters()))
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.gain], lr=0.1)]
    with pytest.raises(CaptureError, match=r"more than one optimizer: gain"):
        Capture(twice, model)


def test_meta_and_custom_tensors_are_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="meta device"):
        attach(model)

    class Custom(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Custom))
    with pytest.raises(CaptureError, match="weight is a Custom"):
        attach(model)


def test_sparse_tensors_are_refused():
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(2).to_sparse())
    with pytest.raises(CaptureError, match=r"graph has layout torch\.sparse_coo; only dense tensors"):
        attach(model)


def test_dtypes_that_no_checkpoint_can_hold_are_refused():
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(CaptureError, match=r"phase: dtype torch\.complex64 has no safetensors spelling"):
        attach(model)


def test_one_parameter_in_two_dtypes_is_refused():
    """Experts that share a parameter in memory are rounded together: their checkpoint tensors must be of one dtype."""
    model = moe("qwen3_moe")
    base = attach(model).schema
    mixed = tuple(
        TensorSpec(spec.name, "F32", spec.shape) if ".experts.3." in spec.name else spec for spec in base.tensors
    )
    with pytest.raises(CaptureError, match=r"experts\.\w+: its checkpoint tensors have several dtypes: .*F32"):
        attach(model, Schema(mixed))


def test_weights_that_are_computed_for_the_checkpoint_are_refused(monkeypatch):
    """Where transformers adds, casts or joins, changed elements of a parameter are not those of a checkpoint tensor."""
    import transformers.core_model_loading as loading

    model = moe("qwen3_moe")
    right = loading.revert_weight_conversion

    def revert(inner, state):
        return {n: t + 1 if "norm" in n else t for n, t in right(inner, state).items()}

    with monkeypatch.context() as patch:
        patch.setattr(loading, "revert_weight_conversion", revert)
        with pytest.raises(CaptureError, match=r"norm\.weight.* is computed from it, not a view of it; refused"):
            attach(model)
    base = attach(model).schema
    with monkeypatch.context() as patch:
        patch.setattr(loading, "revert_weight_conversion", revert)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with pytest.raises(CaptureError, match=r"not in the model: .*norm\.weight.* is computed from it"):
            attach(model, base, trained)
        # Frozen ones may stay what they are in the base, if somebody says so.
        assert len(attach(model, base, trained, constant=("*norm*",)).constant) > 2


def test_weights_that_change_their_kind_after_attaching_are_refused():
    """`model.to(dtype)` keeps the parameter objects and puts other tensors into them."""
    for mode in ("transient", "persistent"):
        model = Tiny(tie=False)
        capture = attach(model, mode=mode)
        model.up.to(torch.float16)
        with pytest.raises(CaptureError, match=r"up\.\w+: local tensor is now torch\.float16 .* needs a new attach"):
            capture.collect()
        model.up.to(torch.float32)
        assert {capture.schema.tensors[c.tensor].name for c in capture.collect().changes} <= {"up.weight", "up.bias"}


def test_a_buffer_that_is_gone_is_refused():
    model = Tiny(tie=False)
    capture = attach(model)
    del model.bias_correction
    with pytest.raises(CaptureError, match=r"bias_correction: its module no longer holds this buffer; attach again"):
        capture.collect()


def test_configuration_is_checked():
    with pytest.raises(CaptureError, match="unknown capture mode"):
        CaptureConfig(mode="eager")
    with pytest.raises(CaptureError, match="at least 1, got 0"):
        CaptureConfig(steps_per_collect=0)
    with pytest.raises(CaptureError, match="takes no placement"):
        CaptureConfig(mode="transient", placement=Placement(kind="cpu"))
    with pytest.raises(CaptureError, match="needs a directory"):
        Placement(kind="file")
    with pytest.raises(CaptureError, match="snapshot directory '/no/such' does not exist"):
        Placement(kind="file", directory=Path("/no/such"))
    with pytest.raises(CaptureError, match="unknown snapshot placement"):
        Placement(kind="moon")


def test_mode_is_chosen_by_publish_interval_and_memory():
    auto, rare = CaptureConfig(), CaptureConfig(steps_per_collect=4)
    assert choose_mode(auto, on_host=False) == "transient"
    assert choose_mode(auto, on_host=True) == "persistent"
    assert choose_mode(rare, on_host=False) == "persistent"
    for config, on_host in ((auto, True), (rare, True), (rare, False)):
        assert choose_mode(config, on_host=on_host, copy_bytes=50, free_bytes=100) == "persistent"
        assert choose_mode(config, on_host=on_host, copy_bytes=51, free_bytes=100) == "transient"
    placed = CaptureConfig(placement=Placement(kind="cpu"))
    assert choose_mode(placed, on_host=False, copy_bytes=51, free_bytes=100) == "persistent"
    assert choose_mode(CaptureConfig(mode="transient", steps_per_collect=4), on_host=True) == "transient"


def test_free_memory_is_shared_among_the_ranks_of_a_host(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = free_memory_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert 0 < free_memory_bytes(torch.device("cpu")) < alone / 500
    assert free_memory_bytes(torch.device("meta")) is None
