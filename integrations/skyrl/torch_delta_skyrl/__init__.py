"""torch_delta for SkyRL: takes the seat of SkyRL's `delta` weight-sync backend, with every trainer rank as a sender.

    import torch_delta_skyrl
    torch_delta_skyrl.register()          # in the training script, before SkyRL builds anything

or, without touching a script, by the environment (``integrations/skyrl/README.md``). SkyRL's own configuration stays:
``weight_sync_backend="delta"`` and its ``delta_weight_sync`` block.

Importing this package imports neither SkyRL, vLLM, Ray nor torch: each name loads what it needs on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta_skyrl.registering import ray_hook, register

_HOME = {"ray_hook": "torch_delta_skyrl.registering", "register": "torch_delta_skyrl.registering"}

__all__ = ["ray_hook", "register"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'torch_delta_skyrl' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """The public names and whatever is loaded already."""
    return sorted({*globals(), *__all__})
