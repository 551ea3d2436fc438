"""Which mode `auto` stands for: by where the weights are, how often they are collected, and what memory is free.

                             persistent                        transient
    extra bytes at rest      sum of numel * itemsize           what changed, see `ExtraBytes`
    extra bytes in a step    0                                 sum and largest of numel * itemsize
    passes over the weights  one per collect                   four per step: copy, hash, compare, hash

Itemsize is that of the serving dtype, sums go over the shards this rank owns.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.capture.config import CaptureConfig
    from torch_delta.capture.unit import Unit

Resolved = Literal["transient", "persistent"]

MAX_SHARE_OF_FREE: Final = 0.5
"""Of the memory free at attach, what a copy kept for the whole training may take: activations come later."""


def mode_of(config: CaptureConfig, units: Sequence[Unit]) -> Resolved:
    """The mode of a rank that owns these units."""
    free = [free_memory_bytes(device) for device in {unit.device for unit in units}]
    return choose_mode(
        config,
        on_host=all(unit.device.type == "cpu" for unit in units),
        copy_bytes=sum(unit.numel * unit.itemsize for unit in units),
        free_bytes=min((each for each in free if each is not None), default=None),
    )


def choose_mode(
    config: CaptureConfig, *, on_host: bool, copy_bytes: int = 0, free_bytes: int | None = None
) -> Resolved:
    """The mode a configuration stands for on this rank.

    Args:
        config: `auto` is decided here, other modes are taken as they are.
        on_host: whether the weights are in host memory.
        copy_bytes: of a persistent copy of this rank's shards.
        free_bytes: where that copy would live; None if it cannot be told, which counts as enough.
    """
    if config.mode != "auto":
        return config.mode
    if config.has_placement:  # somebody has thought about where a copy may live
        return "persistent"
    if not on_host and config.steps_per_collect == 1:
        return "transient"
    fits = free_bytes is None or copy_bytes <= MAX_SHARE_OF_FREE * free_bytes
    return "persistent" if fits else "transient"


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory this process may still take where `device` is; None if the system does not tell.

    On the host, ranks that share it count as equal (`LOCAL_WORLD_SIZE`, which torchrun sets).
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    sharers = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return None if available is None else available // max(int(sharers) if sharers.isdigit() else 1, 1)
