"""The engine core's side of `/fetch_weights`: ranks never raise, so the core looks at what they say and raises there.

vLLM's ranks answer in queues that go out of step for ever when one of them raises where another does not; see
`torch_delta.vllm.supervisor`, which does the same for the calls that vLLM itself knows.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch_delta.vllm import versions
from torch_delta.vllm.records import Failure

FETCH = "fetch_weights"


def watch_fetches() -> None:
    """Put the check around the engine core's remote calls, for engines with our receiver. Idempotent."""
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    original = core.collective_rpc
    if hasattr(original, "torch_delta_skyrl"):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        replies = original(self, method, timeout, args, kwargs)
        if method == FETCH and versions.selected(self.vllm_config):
            raise_failures(replies)
        return replies

    collective_rpc.torch_delta_skyrl = True  # type: ignore[attr-defined]
    core.collective_rpc = collective_rpc


def raise_failures(replies: Any) -> None:
    """Raise the first rank's failure.

    Raises:
        TorchDeltaError: what a rank could not do.
    """
    for reply in replies:
        error = reply.get("error") if isinstance(reply, dict) else None
        if error is not None:
            raise Failure.from_json(error).error()
