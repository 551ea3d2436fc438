"""torch_delta for SkyRL: not there yet; importing this module does nothing.

What will come is a strategy plugin that takes over SkyRL's `delta` weight-sync backend, with every trainer rank as a
sender and the paused phase reduced to writing the changed elements.

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
        f"torch_delta_skyrl.{name}: the SkyRL integration is not in this release; meanwhile use torch_delta.attach in "
        "the trainer and torch_delta.Follower beside the inference servers"
    )
