"""torch_delta for TRL: not there yet; importing this module does nothing.

What will come is `DeltaSync`. For `AsyncGRPOTrainer`: a callback and a weight transfer that publish before the pause
and apply inside it. For `GRPOTrainer`: a callback that replaces its full synchronisation.

Until then, `torch_delta.attach` in the training process and `torch_delta.Follower` beside the inference servers work
with any trainer.
"""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    """Say that the integration is yet to come, for whichever name somebody expects here."""
    if name.startswith("__"):
        raise AttributeError(name)  # what the import system and introspection ask every module for
    # ImportError, because `from ... import name` replaces the message of an AttributeError by its own.
    raise ImportError(
        f"torch_delta_trl.{name}: the TRL integration is not in this release; meanwhile use torch_delta.attach in "
        "the trainer and torch_delta.Follower beside the inference servers"
    )
