"""vLLM follows a stream: an engine for its servers, and `Fleet` for whoever steers them.

    vllm serve Qwen/Qwen3-8B --weight-transfer-config '{"backend": "torch_delta"}'     found by entry point

    engine ── replica ─┬─ background: attaching, preparing ── host (the working copy), routing (where each tensor goes)
    (per rank)         └─ applying: index writes or reload, all ranks or none
    supervisor (engine core) ── endpoints (API process) ── fleet (anywhere)

Importing this package imports no vLLM: modules that need it are loaded by vLLM itself, through `plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.vllm.fleet import Fleet

_HOME = {"Fleet": "torch_delta.vllm.fleet"}

__all__ = ["Fleet"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'torch_delta.vllm' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)
