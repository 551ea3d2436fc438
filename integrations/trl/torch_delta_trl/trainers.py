"""TRL's trainers with one argument more, `delta_sync`, and the mixin that gives it to any subclass of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trl import GRPOTrainer as _GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer as _AsyncGRPOTrainer

if TYPE_CHECKING:
    from torch_delta_trl.delta_sync import DeltaSync

__all__ = ["AsyncGRPOTrainer", "DeltaSyncMixin", "GRPOTrainer"]


class DeltaSyncMixin:
    """Before one of TRL's GRPO trainers in the bases of a class: ``class Mine(DeltaSyncMixin, GRPOTrainer)``.

    Args:
        delta_sync: takes over the trainer's weight synchronisation; the same arguments on every rank.
        *args: of the trainer.
        **kwargs: of the trainer.

    Raises:
        CaptureError: the model cannot be followed exactly (DeepSpeed, FSDP version 1, some PEFT adapters); says what to
            do.
    """

    def __init__(self, *args: Any, delta_sync: DeltaSync, **kwargs: Any) -> None:
        from torch_delta_trl.contract import check_release
        from torch_delta_trl.grpo import building

        check_release()
        self.delta_sync = delta_sync
        is_async = isinstance(self, _AsyncGRPOTrainer)
        if is_async:
            # Else the trainer would ask the server whether it takes adapters, and collect what NCCL would send.
            kwargs.setdefault("weight_transfer", delta_sync.weight_transfer)
        with contextlib.nullcontext() if is_async else building():
            super().__init__(*args, **kwargs)
        delta_sync.wire(self)


class AsyncGRPOTrainer(DeltaSyncMixin, _AsyncGRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's AsyncGRPOTrainer; see `DeltaSyncMixin` for `delta_sync`."""


class GRPOTrainer(DeltaSyncMixin, _GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """TRL's GRPOTrainer with vLLM, in server or colocate mode; see `DeltaSyncMixin` for `delta_sync`."""
