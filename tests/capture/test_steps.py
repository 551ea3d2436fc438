"""Seeing every step exactly once, in every way steps happen, and refusing those that cannot be seen."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests.capture import oracle
from tests.capture.models import Tiny, tokens
from torch_delta.capture import memory
from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.errors import CaptureError


class Watched:
    """A model in training with its capture, its steps counted, its true changes at hand."""

    def __init__(self, optimizer_class=torch.optim.AdamW, config=None, model=None, **options):
        torch.manual_seed(0)
        self.model = model if model is not None else Tiny()
        self.optimizer = optimizer_class(self.model.parameters(), **{"lr": 3e-3, **options})
        self.capture = Capture(self.optimizer, self.model, config=config)
        self.steps: list[int] = []
        self.capture.on_step(self.steps.append)
        self.before = oracle.checkpoint(self.model)

    def backward(self, step=0):
        loss = self.model(tokens(step))
        loss.backward()
        return loss

    def collect(self, *, some=True):
        collected = self.capture.collect()
        after = oracle.checkpoint(self.model)
        assert oracle.mismatches(self.capture.schema, [collected.changes], self.before, after) == []
        assert bool(collected.num_changed) == some
        self.before = after
        return collected


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_any_optimizer(kind, options):
    watched = Watched(kind, **options)
    for step in range(3):
        watched.backward(step)
        watched.optimizer.step()
    assert watched.steps == [1, 2, 3]
    assert watched.collect().num_steps == 3


def test_what_the_optimizer_state_predicts_is_not_what_changes():
    """F17: an update of less than half a step still changes a bit where the master was near a boundary."""
    watched = Watched(lr=1e-5)  # fp32 masters, bf16 served
    weights = {name: p for name, p in watched.model.named_parameters() if p.numel() > 64}
    for step in range(3):
        watched.backward(step)
        before = {name: p.detach().clone() for name, p in weights.items()}
        watched.optimizer.step()
        watched.optimizer.zero_grad()
    num_missed = 0
    for name, now in weights.items():
        old, new = before[name].bfloat16(), now.detach().bfloat16()
        half_a_step = (torch.nextafter(old.abs(), torch.full_like(old, torch.inf)) - old.abs()).float() / 2
        foreseen = (now.detach() - before[name]).abs() >= half_a_step
        num_missed += int(((old != new) & ~foreseen).sum())
    assert num_missed > 0, "else this says nothing"
    watched.collect()  # compares with the truth, element by element


def test_subclass_that_calls_super_counts_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.9)  # after the inner step's post hook

    watched = Watched(Twice)
    watched.backward()
    watched.optimizer.step()
    assert watched.steps == [1]
    assert watched.collect().num_resent == 0


def test_closure_may_evaluate_many_times():
    """F45: what counts is the weights before and after the whole step."""
    watched = Watched(torch.optim.LBFGS, lr=1e-2, max_iter=4)

    def closure():
        watched.optimizer.zero_grad()
        with pytest.raises(CaptureError, match="middle of a step"):
            watched.capture.collect()
        with torch.enable_grad():
            return watched.backward()

    watched.optimizer.step(closure)
    assert watched.steps == [1]
    assert watched.collect().num_resent == 0


@pytest.mark.parametrize("subclassed", [False, True])
def test_step_that_raises_leaves_truth_behind(subclassed):
    """The half-done update belongs to the next collect; later steps are seen again."""

    class Fragile(torch.optim.SGD):
        fail = True

        def step(self, closure=None):
            super().step(closure)
            if self.fail:
                raise RuntimeError("after the update")

    watched = Watched(Fragile)
    watched.optimizer.fail = subclassed
    watched.backward()
    if subclassed:
        with pytest.raises(RuntimeError, match="after the update"):
            watched.optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="closure"):
            watched.optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError("closure")))
    assert watched.steps == []
    watched.collect(some=subclassed)
    watched.optimizer.fail = False
    watched.backward(1)
    watched.optimizer.step()
    assert watched.steps == [1]
    assert watched.collect().num_resent == 0


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_change_nothing(fused):
    watched = Watched(fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(watched.model(tokens(0))).backward()
    watched.model.up.weight.grad.fill_(float("inf"))
    scaler.step(watched.optimizer)
    scaler.update()
    watched.collect(some=False)


def test_groups_schedulers_and_gradient_accumulation():
    torch.manual_seed(0)
    model = Tiny()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "lr": 1e-2}], lr=3e-3)
    step_method = optimizer.step
    capture = Capture(optimizer, model)
    assert optimizer.step == step_method
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    before = oracle.checkpoint(model)
    for step in range(4):
        model(tokens(step)).backward()
        if step % 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    collected = capture.collect()
    assert collected.num_steps == 2
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []


def test_several_optimizers_make_one_step():
    torch.manual_seed(0)
    model = Tiny()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
    others = torch.optim.AdamW([p for p in model.parameters() if p.dim() <= 1], lr=0.1)
    capture = Capture([matrices, others], model)
    before = oracle.checkpoint(model)
    steps = []
    capture.on_step(steps.append)
    for step in range(2):
        model(tokens(step)).backward()
        matrices.step()
        others.step()
    collected = capture.collect()
    assert steps == [1, 2]
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []


def test_unfrozen_layer_is_taken_up():
    """F48: what was planned for the parameters of one step is not kept for others."""
    torch.manual_seed(0)
    model = Tiny()
    model.odd.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    capture = Capture(optimizer, model)
    before = oracle.checkpoint(model)
    model.odd.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.odd.weight]})
    model(tokens(0)).backward()
    optimizer.step()
    collected = capture.collect()
    assert collected.num_resent == 0
    assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []


def test_listener_errors_surface_after_the_step_is_captured():
    watched = Watched()
    watched.capture.on_step(lambda _: (_ for _ in ()).throw(ValueError("background failure")))
    watched.backward()
    with pytest.raises(ValueError, match="background failure"):
        watched.optimizer.step()
    assert watched.collect().num_steps == 1


def test_listener_may_collect_and_be_removed():
    watched = Watched()
    found = []
    remove = watched.capture.on_step(lambda _: found.append(watched.collect()))
    for step in range(2):
        watched.backward(step)
        watched.optimizer.step()
    remove()
    watched.backward(3)
    watched.optimizer.step()
    assert [collected.num_steps for collected in found] == [1, 1]
    assert all(collected.num_resent == 0 for collected in found)


@pytest.fixture
def compiler():
    """A compiler that remembers nothing of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("compiler")
def test_compiled_step_is_seen():
    watched = Watched(torch.optim.SGD, foreach=True)
    compiled = torch.compile(watched.optimizer.step, backend="eager")
    for step in range(2):
        watched.backward(step)
        compiled()
    assert watched.steps == [1, 2]
    assert watched.collect().num_resent == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fullgraph_compiled_step_is_refused():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match="fullgraph=True"):
        Capture(optimizer, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("compiler")
def test_fullgraph_compiled_later_fails_with_our_reason():
    watched = Watched(torch.optim.SGD, foreach=True)
    watched.backward()
    with pytest.raises(Exception, match="compile the optimizer step without fullgraph=True"):
        torch.compile(watched.optimizer.step, backend="eager", fullgraph=True)()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizer_in_backward_is_refused():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Tiny()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(CaptureError, match="optimizer-in-backward"):
        Capture(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_stepping_gradient_hooks_are_refused():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(CaptureError, match="optimizer-in-backward"):
        Capture(optimizer, model)


def test_logging_gradient_hooks_are_fine():
    model = nn.Linear(3, 3)
    norms = []
    model.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    Capture(torch.optim.SGD(model.parameters(), lr=0.1), model).close()


def test_things_without_step_hooks_are_refused():
    with pytest.raises(CaptureError, match=r"not a torch\.optim\.Optimizer"):
        Capture(object(), nn.Linear(2, 2))


def test_close_leaves_the_optimizer_as_it_was():
    watched = Watched()
    watched.capture.close()
    watched.capture.close()
    assert not watched.optimizer._optimizer_step_pre_hooks
    assert not watched.optimizer._optimizer_step_post_hooks
    with pytest.raises(CaptureError, match="closed"):
        watched.capture.collect()


def test_steps_retain_nothing():
    """F43: no object survives a step that was collected and committed."""
    watched = Watched(torch.optim.SGD)
    counts = []
    for step in range(300):
        if step % 100 == 0:
            gc.collect()
            counts.append(len(gc.get_objects()))
        watched.optimizer.zero_grad()
        watched.backward(step)
        watched.optimizer.step()
        watched.capture.commit(watched.capture.collect().token)
    assert counts[2] - counts[1] < 50


def test_transient_mode_keeps_no_bytes_after_a_collect(monkeypatch):
    """The promise of 0 bytes per parameter, and the formulas."""
    monkeypatch.setattr(memory, "num_threads", lambda: 2)
    watched = Watched(config=CaptureConfig(mode="transient"))
    model_bytes = 2 * sum(p.numel() for p in watched.model.parameters())
    buffers = 4 * 5
    assert watched.capture.extra_bytes().persistent == buffers
    assert watched.capture.extra_bytes().in_step == model_bytes + 2 * (12 * 8 + 8 * 12)
    watched.backward()
    watched.optimizer.step()
    assert 0 < watched.capture.extra_bytes().accumulated <= model_bytes
    summed = watched.capture.extra_bytes().accumulated
    watched.backward(1)
    watched.optimizer.step()
    assert watched.capture.extra_bytes().accumulated >= summed  # first old bits of more elements, and marks
    watched.collect()
    assert watched.capture.extra_bytes().accumulated == 0
    persistent = Watched(config=CaptureConfig(mode="persistent")).capture.extra_bytes()
    assert (persistent.persistent, persistent.in_step) == (model_bytes + buffers, 0)
