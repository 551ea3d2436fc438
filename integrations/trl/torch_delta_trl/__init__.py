"""torch_delta for TRL: GRPO trainers keep their vLLM servers current through a stream.

    from torch_delta_trl import AsyncGRPOTrainer, DeltaSync

    trainer = AsyncGRPOTrainer(MODEL, ..., delta_sync=DeltaSync("s3://bucket/run-7", base=MODEL))
    trainer.train()

The two trainers are TRL's own with one argument more. A trainer class of one's own takes `DeltaSyncMixin`; an
`AsyncGRPOTrainer` that exists already is wired with ``DeltaSync.wire(trainer)``.

Importing this package imports neither TRL nor torch: each name loads what it needs on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta_trl.delta_sync import DeltaSync
    from torch_delta_trl.report import SyncReport
    from torch_delta_trl.trainers import AsyncGRPOTrainer, DeltaSyncMixin, GRPOTrainer

_HOME = {
    "AsyncGRPOTrainer": "torch_delta_trl.trainers",
    "DeltaSync": "torch_delta_trl.delta_sync",
    "DeltaSyncMixin": "torch_delta_trl.trainers",
    "GRPOTrainer": "torch_delta_trl.trainers",
    "SyncReport": "torch_delta_trl.report",
}

__all__ = ["AsyncGRPOTrainer", "DeltaSync", "DeltaSyncMixin", "GRPOTrainer", "SyncReport"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torch_delta_trl' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """The public names and whatever is loaded already."""
    return sorted({*globals(), *__all__})
