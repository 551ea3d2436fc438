"""Changes on their own, changes from outside the optimizer, and tensors from anywhere."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

from tests.capture import oracle
from tests.capture.models import Tiny, tokens
from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.placement import Placement
from torch_delta.capture.source import ChangeSource, StepSource
from torch_delta.capture.tensorsource import TensorSource
from torch_delta.errors import CaptureError
from torch_delta.format.schema import Schema, TensorSpec


def trained(mode, **options):
    torch.manual_seed(0)
    model = Tiny(tie=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, Capture(optimizer, model, config=CaptureConfig(mode=mode, **options))


def step(model, optimizer, number=0):
    optimizer.zero_grad()
    model(tokens(number)).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["transient", "persistent"])
def test_standalone_changes_per_step(mode):
    model, optimizer, capture = trained(mode)
    state = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    assert all(change.index.numel() == 0 for change in capture.changes().values())
    for number in range(3):
        step(model, optimizer, number)
        changes = capture.changes()
        for name, parameter in model.named_parameters():
            change, before, now = changes[name], state[name], parameter.detach().to(torch.bfloat16)
            expected = before.view(torch.int16) != now.view(torch.int16)
            assert torch.equal(change.mask, expected)
            assert torch.equal(change.index, expected.reshape(-1).nonzero().view(-1))
            assert torch.equal(change.old, before.view(torch.int16)[expected])
            assert torch.equal(change.new, now.view(torch.int16)[expected])
            assert torch.equal(change.xor, change.old ^ change.new)
            assert torch.equal(change.global_index, change.index)
            assert change.density == pytest.approx(expected.float().mean().item())
            state[name] = now
    assert set(changes) == {n for n, _ in model.named_parameters()} | {"bias_correction"}


def test_standalone_changes_own_their_memory():
    """F25: what was handed out stays as it was."""
    model, optimizer, capture = trained("persistent")
    step(model, optimizer)
    first = capture.changes()["up.weight"]
    kept = (first.index.clone(), first.old.clone(), first.new.clone())
    for number in range(3):
        step(model, optimizer, number)
        capture.changes()
    assert all(torch.equal(a, b) for a, b in zip(kept, (first.index, first.old, first.new), strict=True))


def test_unknown_old_bits_are_said_to_be_unknown():
    model, _, capture = trained("transient")
    capture.changes()
    with torch.no_grad():
        model.up.weight[0, 0] += 1
    change = capture.changes()["up.weight"]
    assert change.index is None
    assert bool(change.mask.all())
    assert torch.equal(change.new.view(12, 8), model.up.weight.detach().to(torch.bfloat16).view(torch.int16))
    with pytest.raises(ValueError, match="old bits are unknown"):
        _ = change.xor


def test_one_capture_serves_one_consumer():
    _, _, capture = trained("transient")
    capture.changes()
    with pytest.raises(CaptureError, match="either changes"):
        capture.collect()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", ["transient", "persistent"])
def test_transposed_layouts(mode, transposed, monkeypatch):
    """Layouts whose checkpoint order is not the memory order (qwen3_vl_moe transposes its experts)."""
    from torch_delta.capture import attach
    from torch_delta.capture.layout import Layout, View

    if transposed:
        turned = View("weight", (5, 3), 0, (1, 5))
        monkeypatch.setattr(attach, "checkpoint_layout", lambda *_: Layout({"weight": turned}, {}, {}))
    model = nn.Linear(5, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(optimizer, model, config=CaptureConfig(mode=mode))

    def checkpoint():
        weight = model.weight.detach().to(torch.bfloat16)
        return {"weight": oracle.bits(weight.t() if transposed else weight)}

    before = checkpoint()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([[1.0, 0, 2.0, 0, 0]])).sum().backward()
        optimizer.step()
    collected = capture.collect()
    assert collected.changes
    assert collected.changes[0].count < 15
    assert oracle.mismatches(capture.schema, [collected.changes], before, checkpoint()) == []
    capture.close()
    alone = Capture(optimizer, model, config=CaptureConfig(mode=mode))
    with torch.no_grad():
        was = model.weight.detach().to(torch.bfloat16)
        optimizer.step()
    expected = was.view(torch.int16) != model.weight.detach().to(torch.bfloat16).view(torch.int16)
    change = alone.changes()["weight"]
    assert torch.equal(change.mask, expected)
    assert torch.equal(change.old, was.view(torch.int16)[expected])


@pytest.mark.parametrize("mode", ["transient", "persistent"])
@pytest.mark.parametrize("when", ["before a step", "at a collect"])
def test_changes_outside_the_optimizer(mode, when):
    """load_state_dict, weight averaging and the like are noticed, whatever moved where (a swap keeps every sum)."""
    model, optimizer, capture = trained(mode)
    before = oracle.checkpoint(model)
    with torch.no_grad():
        a, b = model.up.weight[0, 0].clone(), model.up.weight[7, 3].clone()
        model.up.weight[0, 0], model.up.weight[7, 3] = b, a
        model.bias_correction[2] += 1
    if when == "before a step":
        step(model, optimizer)
    after = oracle.checkpoint(model)
    collected = capture.collect()
    assert oracle.mismatches(capture.schema, [collected.changes], before, after) == []
    assert collected.num_resent == (mode == "transient")
    assert ("up.weight" in collected.info.get("out_of_band", "")) == (mode == "transient")
    if when == "at a collect":
        assert {capture.schema.tensors[c.tensor].name for c in collected.changes} == {"up.weight", "bias_correction"}
    capture.commit(collected.token)
    step(model, optimizer, 1)
    again = capture.collect()
    assert again.num_resent == 0
    assert oracle.mismatches(capture.schema, [again.changes], after, oracle.checkpoint(model)) == []


@pytest.mark.parametrize("mode", ["transient", "persistent"])
def test_objects_assigned_anew_are_noticed(mode):
    """F23: `module.buffer = ...` and load_state_dict(assign=True) put other objects in the place of the bound ones."""
    torch.manual_seed(0)
    model = Tiny(tie=False)
    model.up.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    capture = Capture(optimizer, model, config=CaptureConfig(mode=mode))
    before = oracle.checkpoint(model)
    model.bias_correction = model.bias_correction + 1
    model.up.load_state_dict({name: value + 1 for name, value in model.up.state_dict().items()}, assign=True)
    step(model, optimizer)
    collected = capture.collect()
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []
    names = {capture.schema.tensors[change.tensor].name for change in collected.changes}
    assert {"bias_correction", "up.weight"} <= names


def test_a_trained_parameter_assigned_anew_is_refused():
    """The optimizer goes on updating an object that the model no longer uses."""
    model, _, capture = trained("persistent")
    model.up.load_state_dict(model.up.state_dict(), assign=True)
    with pytest.raises(
        CaptureError, match=r"up\.weight: the model now holds another object than the optimizer updates"
    ):
        capture.collect()


def test_loaded_weights_are_noticed():
    model, optimizer, capture = trained("transient")
    step(model, optimizer)
    capture.commit(capture.collect().token)
    before = oracle.checkpoint(model)
    other = Tiny(tie=False)
    model.load_state_dict(other.state_dict())
    step(model, optimizer)
    collected = capture.collect()
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []
    assert collected.num_resent > 5


def test_frozen_parameters_are_watched_at_collects():
    model, optimizer, capture = trained("transient")
    capture.close()
    model.odd.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    capture = Capture(optimizer, model, config=CaptureConfig(mode="transient"))
    before = oracle.checkpoint(model)
    step(model, optimizer)
    with torch.no_grad():
        model.odd.weight.mul_(2)
    collected = capture.collect()
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []
    assert collected.num_resent == 1


@pytest.mark.parametrize("kind", ["cpu", "file"])
def test_snapshot_placements(kind, tmp_path):
    """F50."""
    placement = Placement(kind=kind, directory=tmp_path if kind == "file" else None)
    model, optimizer, capture = trained("persistent", placement=placement)
    assert list(tmp_path.iterdir()) == []
    before = oracle.checkpoint(model)
    step(model, optimizer)
    collected = capture.collect()
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []
    capture.close()
    gc.collect()


def test_non_contiguous_parameters():
    """F36: what only looks contiguous is read by logical position."""
    model = nn.Module()
    model.w = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    assert not model.w.is_contiguous()
    capture = Capture(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with torch.no_grad():
        model.w[3, 1] = 100.0
    (change,) = capture.collect().changes
    assert (change.index.tolist(), change.new.tolist()) == ([10], [0x42C8])


def test_reading_regions():
    model, optimizer, capture = trained("transient")
    before = oracle.checkpoint(model)
    step(model, optimizer)
    found = {capture.schema.tensors[r.tensor].name: r.bits.copy() for r in capture.regions()}
    assert all(np.array_equal(found[name], before[name]) for name in found)
    (item,) = [i for i in capture.owned if capture.schema.tensors[i.tensor].name == "up.weight"]
    box = type(item.box)((2, 3), (4, 2))
    assert np.array_equal(capture.read(item.tensor, box), before["up.weight"][2:6, 3:5])
    with pytest.raises(CaptureError, match="not inside a box this rank owns"):
        capture.read(item.tensor, type(item.box)((2, 3), (40, 2)))


def test_tokens_are_used_in_order():
    model, optimizer, capture = trained("persistent")
    step(model, optimizer)
    first = capture.collect().token
    second = capture.collect().token
    with pytest.raises(CaptureError, match="not the oldest open one"):
        capture.commit(second)
    capture.rollback(second)
    capture.commit(first)
    with pytest.raises(CaptureError, match="not open"):
        capture.rollback(first)


def test_captures_are_sources():
    _, _, capture = trained("transient")
    assert isinstance(capture, StepSource)
    assert isinstance(_source()[0], ChangeSource)


def _source(**options):
    tensors = {"a": torch.zeros(3, 4), "b": torch.ones(5)}
    schema = Schema((TensorSpec("a", "BF16", (3, 4)), TensorSpec("b", "F32", (5,)), TensorSpec("c", "F32", (5,), "b")))
    return TensorSource(lambda: list(tensors.items()), schema, **options), tensors


def test_walked_tensors():
    source, tensors = _source()
    assert source.collect().changes == ()
    tensors["a"][1, 1] = 1.0
    tensors["b"] = torch.full((5,), 2.0)
    collected = source.collect()
    found = [(c.tensor, None if c.index is None else c.index.tolist(), c.new.tolist()) for c in collected.changes]
    assert found == [(0, [5], [0x3F80]), (1, [0, 1, 2, 3, 4], [0x40000000] * 5)]
    source.rollback(collected.token)
    tensors["b"].fill_(1.0)
    (change,) = source.collect().changes
    assert change.tensor == 0
    source.close()
    source.close()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"a": torch.zeros(3, 4)}, "did not yield b"),
        ({"a": torch.zeros(3, 4), "b": torch.ones(5), "x": torch.ones(1)}, "'x', which is not in the schema"),
        ({"a": torch.zeros(3, 5), "b": torch.ones(5)}, r"yields shape \(3, 5\)"),
        ({"a": torch.zeros(3, 4, dtype=torch.int8), "b": torch.ones(5)}, "cannot be served as BF16"),
    ],
)
def test_walks_that_disagree_are_refused(pairs, message):
    """F11, F47, F60: at the start and later; a failed walk changes nothing."""
    source, tensors = _source()
    with pytest.raises(CaptureError, match=message):
        TensorSource(pairs.items(), source.schema)
    good = dict(tensors)
    tensors["b"] = torch.zeros(5)
    (expected,) = source.collect().changes
    source.rollback(1)
    tensors.clear()
    tensors.update(pairs)
    with pytest.raises(CaptureError, match=message):
        source.collect()
    tensors.clear()
    tensors.update(good, b=torch.zeros(5))
    (change,) = source.collect().changes
    assert np.array_equal(change.old, expected.old)


def test_a_tensor_that_is_yielded_twice_or_is_no_ordinary_one_is_refused():
    class Custom(torch.Tensor):
        pass

    source, tensors = _source()
    with pytest.raises(CaptureError, match="the walk yields 'a' twice"):
        TensorSource([*tensors.items(), ("a", tensors["a"])], source.schema)
    with pytest.raises(CaptureError, match="b: the walk yields a Custom; full, ordinary tensors are needed"):
        TensorSource({**tensors, "b": tensors["b"].as_subclass(Custom)}.items(), source.schema)


def test_walks_that_cannot_repeat_are_refused():
    source, tensors = _source()
    with pytest.raises(CaptureError, match="only once"):
        TensorSource(iter(tensors.items()), source.schema)
    with pytest.raises(CaptureError, match="no rank can walk"):
        TensorSource(None, source.schema)
