"""Collect, commit, rollback against a dict of bits under random edits: in steps, outside them, in failing steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import nn

from tests.capture import oracle
from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.errors import CaptureError
from torch_delta.format.digest import digest_words

VALUES = [0.0, -0.0, 1.0, 1.0 + 2**-20, -2.5, float("nan"), float("inf")]
EDITS = st.lists(st.tuples(st.integers(0, 11), st.sampled_from(VALUES)), max_size=6)


class Scripted(torch.optim.Optimizer):
    """Writes what it is told; may raise half-way."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, edits=(), fail_at=None):
        flat = [p.view(-1) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for number, (position, value) in enumerate(edits):
                if number == fail_at:
                    raise RuntimeError("half-way")
                flat[position % 2][position % flat[position % 2].numel()] = value


class Machine(RuleBasedStateMachine):
    mode = "transient"
    keeps_copies = False
    dtype = torch.float32
    tokens = Bundle("tokens")

    def __init__(self):
        super().__init__()
        self.module = nn.Module()
        self.module.a = nn.Parameter(torch.ones(3, 4, dtype=self.dtype))
        self.module.b = nn.Parameter(torch.ones(5, dtype=self.dtype))
        self.module.register_buffer("c", torch.ones(4, dtype=self.dtype))
        self.module.frozen = nn.Parameter(torch.ones(2, dtype=self.dtype), requires_grad=False)
        self.optimizer = Scripted([self.module.a, self.module.b])
        self.capture = Capture(self.optimizer, self.module, config=CaptureConfig(mode=self.mode))
        for keeper in self.capture._keepers if self.keeps_copies else ():
            keeper._keeps_copies = True
        self.schema = self.capture.schema
        self.collected = self.now()
        self.open = []  # (token, state before)
        self.touched_outside: set[str] = set()  # since the oldest state a re-send could go back to
        self.touched_lately: set[str] = set()  # since the last collect

    def now(self):
        kinds = {spec.name: spec.dtype for spec in self.schema.tensors}
        wide = {"BF16": torch.bfloat16, "F32": torch.float32}
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: oracle.bits(tensor.to(wide[kinds[name]])) for name, tensor in tensors.items()}

    @rule(edits=EDITS)
    def step(self, edits):
        self.optimizer.step(edits)

    @rule(edits=EDITS, fail_at=st.integers(0, 5))
    def failing_step(self, edits, fail_at):
        if fail_at < len(edits):
            with pytest.raises(RuntimeError, match="half-way"):
                self.optimizer.step(edits, fail_at)

    @rule(name=st.sampled_from(["a", "b", "c", "frozen"]), position=st.integers(0, 11), value=st.sampled_from(VALUES))
    def outside(self, name, position, value):
        with torch.no_grad():
            flat = getattr(self.module, name).view(-1)
            flat[position % flat.numel()] = value
        self.touched_outside.add(name)
        self.touched_lately.add(name)

    @rule(target=tokens)
    def collect(self):
        before, after = self.collected, self.now()
        collected = self.capture.collect()
        assert oracle.mismatches(self.schema, [collected.changes], before, after) == []
        for change in collected.changes:
            spec = self.schema.tensors[change.tensor]
            moved = digest_words(after[spec.name].reshape(-1).tolist())
            moved = moved - digest_words(before[spec.name].reshape(-1).tolist())
            assert change.increment == moved
            if change.index is None:
                assert self.mode == "transient"
                assert spec.name in self.touched_outside
                assert spec.name != "c"  # buffers always keep their old bits
        assert len(collected.changes) == len({change.tensor for change in collected.changes})
        self.open.append((collected.token, before))
        self.collected = after
        self.touched_lately = set()
        return collected.token

    @rule()
    def commit(self):
        if self.open:
            self.capture.commit(self.open.pop(0)[0])
        if not self.open:
            self.touched_outside = set(self.touched_lately)

    @rule(token=tokens)
    def rollback(self, token):
        numbers = [number for number, _ in self.open]
        if token in numbers:
            self.capture.rollback(token)
            place = numbers.index(token)
            self.collected = self.open[place][1]
            self.touched_lately = set(self.touched_outside)
            del self.open[place:]

    @rule()
    def regions_are_the_collected_state(self):
        try:
            found = {region.tensor: region.bits.copy() for region in self.capture.regions()}
        except CaptureError:
            assert self.mode == "transient"
            assert self.touched_outside
            return
        for tensor, bits in found.items():
            assert np.array_equal(bits, self.collected[self.schema.tensors[tensor].name])

    @invariant()
    def digests_are_those_of_the_collected_state(self):
        for tensor, digest in self.capture.digests().items():
            assert digest == digest_words(self.collected[self.schema.tensors[tensor].name].reshape(-1).tolist())

    def teardown(self):
        self.capture.close()


@pytest.mark.parametrize("mode", ["transient", "transient as on a device", "persistent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_machine(mode, dtype):
    """F01, F03, F05, F19: nothing is lost, doubled or wrong whatever the order of events."""

    class Chosen(Machine):
        pass

    Chosen.mode, Chosen.dtype, Chosen.keeps_copies = mode.split()[0], dtype, "device" in mode
    run_state_machine_as_test(Chosen, settings=settings(max_examples=50, stateful_step_count=25))
