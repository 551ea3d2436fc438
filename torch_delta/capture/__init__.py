"""A live model -> the changed elements of the shards this rank owns.

    source.py       the seam to publish: what a Publisher consumes
    capture.py      an optimizer and its model as a source;  tensorsource.py a walk over (name, full tensor) pairs
    attach.py       binding, once: names.py, layout.py, shards.py, regions.py say what is where; resolve.py matches it
                    against the base checkpoint; ownership.py decides who reports which element
    optimizer_hooks.py  seeing every step;  unit.py, history.py, arrays.py  old bits, new bits, what differs
    ledger.py       collect, commit, roll back;  shardchange.py  changes on their own, without a stream

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
