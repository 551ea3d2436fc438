"""torch_delta: ship exactly the weights an optimizer step changed, from every rank, through any bucket.

    publisher = torch_delta.attach(optimizer, model, "/shared/run", base="Qwen/Qwen3-8B")   # in the trainer, every rank
    for report in torch_delta.Follower("/shared/run").apply_to(checkpoint): ...             # where tokens are made

Importing this package does nothing: each public name below loads its subpackage on first use (PEP 562), so a follower
never imports torch.distributed and nothing imports vllm, obstore or numba unasked.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.capture import Capture, TensorSource
    from torch_delta.config import PublishConfig, RetentionConfig
    from torch_delta.errors import TorchDeltaError
    from torch_delta.publish import Publisher, attach, attach_source
    from torch_delta.receive import Follower, LocalCheckpoint, pull
    from torch_delta.store import open_store

_HOME = {
    "Capture": "torch_delta.capture",
    "Follower": "torch_delta.receive",
    "LocalCheckpoint": "torch_delta.receive",
    "PublishConfig": "torch_delta.config",
    "Publisher": "torch_delta.publish",
    "RetentionConfig": "torch_delta.config",
    "TensorSource": "torch_delta.capture",
    "TorchDeltaError": "torch_delta.errors",
    "attach": "torch_delta.publish",
    "attach_source": "torch_delta.publish",
    "open_store": "torch_delta.store",
    "pull": "torch_delta.receive",
}

__all__ = [
    "Capture",
    "Follower",
    "LocalCheckpoint",
    "PublishConfig",
    "Publisher",
    "RetentionConfig",
    "TensorSource",
    "TorchDeltaError",
    "attach",
    "attach_source",
    "open_store",
    "pull",
]


def __getattr__(name: str) -> object:
    """Load a public name from the subpackage that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torch_delta' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """The public names and whatever is loaded already."""
    return sorted({*globals(), *__all__})
