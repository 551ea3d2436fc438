"""Ranks whose memory the tests watch: anonymous memory of a process, sampled by a thread of its own.

File pages that are only mapped (the working copy of a follower) belong to the page cache and are not counted.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Self

import torch
from torch import nn

import torch_delta

ROWS, COLUMNS = 1024, 2048
TENSOR_BYTES = 2 * ROWS * COLUMNS
CHANGED_PER_STEP = 400_000


class Peak:
    """The most anonymous memory of this process inside the block, beyond what it had at the start."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._start_bytes = self._most_bytes = anonymous_bytes()
        self.num_samples = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._most_bytes = max(self._most_bytes, anonymous_bytes())
            self.num_samples += 1

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self.extra_bytes = max(self._most_bytes, anonymous_bytes()) - self._start_bytes


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("this kernel does not tell RssAnon")


class Model(nn.ModuleDict):
    """Layers that are never run: the gradients are made by hand."""

    def forward(self) -> None:
        """FSDP2 wants one."""


def build(num_tensors: int) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = Model()
    for index in range(num_tensors):
        model[f"layer{index:03}"] = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def write_base(folder: Path, num_tensors: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file(build(num_tensors).state_dict(), folder / "model.safetensors")


def train(rank: int, root: str, base: str, num_tensors: int, mode: str, shard: bool) -> dict[str, int]:
    """Three versions; the first warms up. Every step changes about `CHANGED_PER_STEP` elements of the whole model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(num_tensors)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    generator = torch.Generator().manual_seed(rank)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def new_gradients() -> None:
        for parameter in parameters:
            local = parameter.grad.to_local() if shard else parameter.grad
            flat = local.view(-1)
            flat.zero_()
            count = CHANGED_PER_STEP // num_tensors * flat.numel() // (ROWS * COLUMNS)
            flat[torch.randint(flat.numel(), (count,), generator=generator)] = 0.5

    owned_bytes = sum((p.to_local() if shard else p).numel() * 2 for p in parameters)
    new_gradients()  # touches every page of them
    start_bytes = anonymous_bytes()
    config = torch_delta.PublishConfig(mode=mode, anchor_share=None)
    publisher = torch_delta.attach(optimizer, model, root, base=base, config=config)
    optimizer.step()
    publisher.wait()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not what capture keeps
    rest_bytes = anonymous_bytes() - start_bytes
    with Peak() as peak:
        for _ in range(2):
            new_gradients()
            optimizer.step()
            publisher.wait()
    publisher.close()
    return {
        "owned_bytes": owned_bytes,
        "rest_bytes": rest_bytes,
        "extra_bytes": peak.extra_bytes,
        "num_samples": peak.num_samples,
        "num_changed": publisher.reports[-1].num_changed,
    }


def follow(root: str, folder: str, base: str) -> dict[str, int]:
    """Version 1 warms up; what versions 2 and 3 take."""
    checkpoint = torch_delta.LocalCheckpoint(folder, base=base)
    with torch_delta.Follower(root, verify="every") as follower:
        list(follower.apply_to(checkpoint, until=1, timeout_s=60))
        with Peak() as peak:
            reports = list(follower.apply_to(checkpoint, until=3, timeout_s=60))
    return {
        "extra_bytes": peak.extra_bytes,
        "num_samples": peak.num_samples,
        "num_changed": sum(report.num_changed for report in reports),
        "version": checkpoint.version,
    }


def follow_rank(rank: int, **arguments: str) -> dict[str, int]:
    """`follow` in a process of its own."""
    assert rank == 0
    return follow(**arguments)
