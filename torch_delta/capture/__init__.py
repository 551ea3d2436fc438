"""A live model -> the changed elements of the shards this rank owns.

    source.py       the seam to publish: what a Publisher consumes
    capture.py      an optimizer and its model as a source;  tensorsource.py a walk over (name, full tensor) pairs
    attach.py       binding, once: names.py, layout.py, shards.py, regions.py say what is where; resolve.py matches it
                    against the base checkpoint; ownership.py decides who reports which element
    optimizer_hooks.py  seeing every step;  unit.py, history.py, marks.py  old bits, new bits, what changed since
    sweep.py        compare, take, move the copy along: kernels.py (host), triton_sweep.py (GPU), arrays.py (reference);
                    crew.py shares the work among threads, policy.py and memory.py say which mode and how many bytes
    ledger.py       collect, commit, roll back;  boxchanges.py, packed_torch.py  what goes to the codec
    shardchange.py  changes on their own, without a stream

No collective after construction, with one documented exception (parameters replaced before the first step).
"""

from __future__ import annotations

from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.memory import ExtraBytes
from torch_delta.capture.placement import Placement
from torch_delta.capture.shardchange import ShardChange
from torch_delta.capture.source import ChangeSource, Collected, OwnedBox, Region, StepSource
from torch_delta.capture.tensorsource import TensorSource

__all__ = [
    "Capture",
    "CaptureConfig",
    "ChangeSource",
    "Collected",
    "ExtraBytes",
    "OwnedBox",
    "Placement",
    "Region",
    "ShardChange",
    "StepSource",
    "TensorSource",
]
