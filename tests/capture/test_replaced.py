"""Parameters that are other objects than those attached to: taken up before training, refused afterwards (F44)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.capture import oracle
from tests.capture.models import Tiny, tokens
from torch_delta.capture.capture import Capture
from torch_delta.errors import CaptureError


def replace(model, optimizer, change=lambda value: value):
    """As `accelerator.prepare` does: every parameter a new object, in the model and in the optimizer."""
    new = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new.setdefault(old, nn.Parameter(change(old.detach().clone())))
            setattr(module, name, new[old])
    for group in optimizer.param_groups:
        group["params"] = [new[parameter] for parameter in group["params"]]


def step(model, optimizer):
    optimizer.zero_grad()
    model(tokens(0)).backward()
    optimizer.step()


@pytest.fixture
def attached():
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Capture(optimizer, model)


def test_before_the_first_step_they_are_taken_up(attached):
    model, optimizer, capture = attached
    replace(model, optimizer)
    before = oracle.checkpoint(model)
    step(model, optimizer)
    collected = capture.collect()
    assert (collected.num_steps, collected.num_resent) == (1, 0)
    assert collected.num_changed > 0
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []


def test_with_other_values_they_are_refused(attached):
    model, optimizer, _ = attached
    replace(model, optimizer, lambda value: value + (value.shape == (12,)))
    with pytest.raises(CaptureError, match=r"weights changed while parameters were replaced .*\(up\.bias\)") as caught:
        step(model, optimizer)
    assert caught.value.tensors == ("up.bias",)


def test_after_the_first_step_they_are_refused(attached):
    model, optimizer, _ = attached
    step(model, optimizer)
    replace(model, optimizer)
    with pytest.raises(CaptureError, match=r"replaced by other objects after training began .* attach again"):
        step(model, optimizer)
