"""What a collect reduces for `packed` is what the bits of the whole box, gathered by torch itself, give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.capture import oracle
from tests.capture.models import Tiny, moe, tokens
from torch_delta.capture import Capture, CaptureConfig, TensorSource
from torch_delta.codec.packed.reduced import reduce_change
from torch_delta.format.schema import Schema, TensorSpec


def same(one, other):
    if (one.start, one.boundary) != (other.start, other.boundary):
        return False
    columns = ("counts", "populations", "gaps", "steps")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def check(schema, changes, now):
    assert changes
    for change in changes:
        spec = schema.tensors[change.tensor]
        region = now[spec.name][oracle.window_of(change.box)]
        truth = reduce_change(spec.dtype, change.box, change.index, change.old, change.new, region)
        assert len(change.reduced) == len(truth)
        assert all(map(same, change.reduced, truth))


@pytest.mark.parametrize("mode", ["transient", "persistent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_with_the_bits_around(mode, dtype):
    torch.manual_seed(0)
    model = Tiny().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    capture = Capture(optimizer, model, config=CaptureConfig(mode=mode))
    for step in range(2):
        model(tokens(step)).backward()
        optimizer.step()
    check(capture.schema, capture.collect().changes, oracle.checkpoint(model))
    capture.wants_ranks = False
    model(tokens(2)).backward()
    optimizer.step()
    assert {change.reduced for change in capture.collect().changes} == {None}


def test_reduced_in_checkpoint_layout():
    """One tensor per expert in the checkpoint, all in one in memory: each box is reduced with its own bits."""
    torch.manual_seed(0)
    model = moe()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    capture = Capture(optimizer, model)
    model(input_ids=torch.randint(37, (2, 8)), labels=torch.randint(37, (2, 8))).loss.backward()
    optimizer.step()
    changes = capture.collect().changes
    assert any(".experts." in capture.schema.tensors[change.tensor].name for change in changes)
    check(capture.schema, changes, oracle.checkpoint(model, model))


def test_walked_tensors_are_reduced():
    schema = Schema((TensorSpec("a", "BF16", (3, 40)),))
    state = {"a": torch.linspace(-2, 2, 120).reshape(3, 40)}
    source = TensorSource(state.items, schema)
    state["a"][:, ::7] *= 1.01
    check(schema, source.collect().changes, {"a": oracle.bits(state["a"].bfloat16())})
    source.wants_ranks = False
    state["a"][0, 0] = 9.0
    assert [change.reduced for change in source.collect().changes] == [None]
