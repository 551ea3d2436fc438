"""The Triton passes give the bits of torch's own operations; steps on a device lose nothing. Needs a GPU, or Triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.capture import oracle
from torch_delta.capture import Capture, CaptureConfig, arrays, triton_sweep

ODD = (0x7FC00000, -1, 0x7F800001, 0x7F800000, -0x800000, 0x7F7FFFFF, -0x80000000, 1, 0x3F808000, 0x3F818000)


def case(num, dtype, device, seed=0):
    """Weights with every odd value, and a copy of their bf16 bits in which some differ."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (num,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[: len(ODD)] = torch.tensor(ODD, dtype=torch.int32)[:num]
    weights = bits.view(torch.float32).to(device)
    weights = weights if dtype == torch.float32 else weights.to(dtype)
    now = arrays.to_bits(weights, torch.bfloat16).clone()
    before = now.clone()
    flips = torch.rand(num, generator=generator).to(device) < 0.02
    before[flips] ^= 5
    return weights, now, before


def check(found, now, before, copy):
    index = (now.cpu() != before.cpu()).nonzero().view(-1)
    assert torch.equal(found[0].cpu().long(), index)
    assert torch.equal(found[1].cpu(), before.cpu()[index])
    assert torch.equal(found[2].cpu(), now.cpu()[index])
    assert torch.equal(copy.cpu(), now.cpu())


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 4095, 4096, 4097, 1_000_003])
def test_kernels_on_a_gpu(dtype, num):
    weights, now, before = case(num, dtype, "cuda")
    copy = before.clone()
    found = triton_sweep.sweep_on_device(copy, weights)
    assert found is not None
    check(found, now, before, copy)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["transient", "persistent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_on_a_gpu_wait_for_nothing_and_lose_nothing(mode, dtype):
    """F03: several steps between two collects, none of which synchronises with the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8)).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    capture = Capture(optimizer, model, config=CaptureConfig(mode=mode))
    for _ in range(2):
        before = oracle.checkpoint(model)
        for _ in range(3):
            model(torch.randn(4, 64, device="cuda", dtype=dtype)).float().square().sum().backward()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        collected = capture.collect()
        assert oracle.mismatches(capture.schema, [collected.changes], before, oracle.checkpoint(model)) == []
        assert collected.num_changed
        assert collected.num_resent == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter needs no GPU")
def test_kernels_in_the_interpreter():
    code = (
        "import torch\nfrom tests.capture.test_gpu import case, check\n"
        "from torch_delta.capture import arrays, triton_kernels, triton_sweep\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    for num in (1, 4095, 4097, 20_000):\n"
        "        weights, now, before = case(num, dtype, 'cpu')\n"
        "        copy = before.clone()\n"
        "        check(triton_sweep.run(triton_kernels, copy, weights, arrays.nan_bits()), now, before, copy)\n"
        "print('same')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.stdout.strip() == "same", run.stderr
