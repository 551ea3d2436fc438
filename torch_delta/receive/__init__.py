"""From commits to a checkpoint folder on this host: `LocalCheckpoint` holds one, `Follower` brings it to new versions.

Needs no GPU, no torch and no connection to the trainer.
"""

from __future__ import annotations

from torch_delta.receive.consumers import Consumer
from torch_delta.receive.follower import Follower
from torch_delta.receive.local_checkpoint import LocalCheckpoint
from torch_delta.receive.patches import Patch, PatchSlice
from torch_delta.receive.prepared import Prepared
from torch_delta.receive.pulling import pull
from torch_delta.receive.reports import ApplyReport, VerifyReport
from torch_delta.receive.session import Session

__all__ = [
    "ApplyReport",
    "Consumer",
    "Follower",
    "LocalCheckpoint",
    "Patch",
    "PatchSlice",
    "Prepared",
    "Session",
    "VerifyReport",
    "pull",
]
