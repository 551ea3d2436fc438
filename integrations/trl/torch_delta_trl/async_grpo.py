"""AsyncGRPOTrainer: synchronise from a callback on every rank, before the trainer's own step, which then does nothing.

The trainer's own order is: pause, barrier, send (main process) or drain the gathered parameters (others), barrier,
resume, next `model_version`. Its seam for other transfers runs on the main process only and inside the pause. So the
work is done by a callback in front of it: all ranks publish, servers prepare while they generate, and the pause holds
the apply alone; what fails is raised by every rank before any of them enters a barrier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_delta_trl.adapters import is_adapted, keep_unmerged
from torch_delta_trl.callback import SyncCallback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import TrainerCallback

    from torch_delta_trl.delta_sync import DeltaSync

__all__ = ["SyncedTransfer", "wire"]


class SyncedTransfer:
    """TRL's `WeightTransferProtocol`, for weights that are there already. Main process only."""

    def __init__(self, sync: DeltaSync) -> None:
        self._sync = sync

    def init_weight_transfer(self) -> None:
        """Nothing: the callback attached and found the servers."""

    def pause(self) -> None:
        """Nothing: the servers were paused, and are running again."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Check that the weights of this step were sent.

        Args:
            iterator: of gathered parameters; left alone, it has none.
        """
        del iterator
        self._sync.check_synced()

    def resume(self) -> None:
        """Nothing; see `pause`."""

    def destroy(self) -> None:
        """Called when training ends, also by an error: hooks are removed, nothing is waited for."""
        self._sync.end(clean=False)


class _StepCallback(SyncCallback):
    """Synchronises at the steps at which the trainer would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the trainer's own `_sync_weight`, at the same steps."""
        del control, kwargs
        if state.global_step % args.weight_sync_steps == 0:
            self.sync.push()


def wire(sync: DeltaSync, trainer: Any) -> None:
    """Put the callback in front, give the main process a transfer that does nothing, and gather nothing anywhere."""
    callback: TrainerCallback = _StepCallback(sync)
    # In front of the trainer's own callbacks, the first of which synchronises and starts the rollouts.
    trainer.callback_handler.callbacks.insert(0, callback)
    trainer._streaming_iter = lambda: iter(())
    if is_adapted(trainer.accelerator.unwrap_model(trainer.model)):
        keep_unmerged(trainer)
    if trainer.accelerator.is_main_process:
        trainer.weight_transfer = sync.weight_transfer
