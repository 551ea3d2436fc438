"""The part of a synchronisation that follows the trainer's life: attach when it begins, let go when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from torch_delta_trl.delta_sync import DeltaSync


class SyncCallback(TrainerCallback):
    """On every rank.

    Args:
        sync: wired to the trainer whose callback this is.
    """

    def __init__(self, sync: DeltaSync) -> None:
        self.sync = sync

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Optimizer and model are prepared, sharded and, when training is resumed, loaded."""
        del args, state, control, kwargs
        self.sync.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for what is in flight; servers stay at the last version."""
        del args, state, control, kwargs
        self.sync.end()
