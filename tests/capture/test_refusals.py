"""The dry run at attach: everything that does not match is named, nothing is guessed or skipped."""

from __future__ import annotations

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


def test_configuration_is_checked():
    with pytest.raises(CaptureError, match="unknown capture mode"):
        CaptureConfig(mode="eager")
    with pytest.raises(CaptureError, match="at least 1, got 0"):
        CaptureConfig(steps_per_collect=0)
    with pytest.raises(CaptureError, match="takes no placement"):
        CaptureConfig(mode="transient", placement=Placement(kind="cpu"))
    with pytest.raises(CaptureError, match="needs a directory"):
        Placement(kind="file")
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
