"""The general plugin: what vLLM runs once in each of its processes, before it builds anything.

It makes the backend known by name, gives workers the methods that prepare and tell, and puts the supervisor around the
engine core's remote calls. All of it sleeps unless an engine is started with
``--weight-transfer-config '{"backend": "torch_delta"}'``. An unsupported vLLM is refused when such an engine starts.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from torch_delta.errors import TorchDeltaError
from torch_delta.vllm import supervisor, versions
from torch_delta.vllm import worker as methods

logger = logging.getLogger("torch_delta")

_cpus: frozenset[int] | None = None


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may run any number of times."""
    remember_cpus()
    reason = versions.refusal(versions.installed())
    if reason:
        _register_refusal(reason)
        return
    versions.register_engine("torch_delta.vllm.engine", "TorchDeltaEngine")
    versions.graft(methods.METHODS)
    versions.watch_weights(methods.weights_lost, methods.sleeps, methods.wakes)
    versions.watch_workers(_worker_starts)
    versions.wrap_collective_rpc(_around)


def _register_refusal(reason: str) -> None:
    """On an unsupported vLLM: other engines of this environment go on; one with our backend does not start."""
    try:
        versions.register_engine("torch_delta.vllm.refused", "RefusedEngine")
    except (ImportError, AttributeError):
        logger.warning("%s", reason)  # so old or new that it has no such registry; then nobody can select us


def _worker_starts(worker: Any) -> None:
    """Before a worker builds its model; what is raised here ends the start of its engine.

    Raises:
        TorchDeltaError: the engine cannot be followed as it is configured, or not on this CPU.
    """
    if not versions.selected(worker.vllm_config):
        return
    versions.check_engine(worker.vllm_config)
    from torch_delta.vllm import unpacked  # costs an import of vLLM's layers, which only workers need

    unpacked.keep_unpacked()
    problem = unpacked.problem()
    if problem is not None:
        raise TorchDeltaError(
            f"{problem}, and packed weights cannot be updated in place. Use a vLLM that torch_delta was tested with "
            "(docs/vllm.md), or serve on a GPU"
        )


def _around(core: Any, original: Any, method: Any, timeout: Any, arguments: tuple[Any, Any]) -> Any:
    args, kwargs = arguments
    if method not in supervisor.WATCHED:
        return original(method, timeout, args, kwargs)

    def call(method: str, *, args: Any = (), kwargs: Any = None) -> Any:
        return original(method, None, tuple(args), kwargs)

    return supervisor.supervise(call, _Core(core), method, tuple(args), dict(kwargs or {}))


class _Core:
    """See `supervisor.Core`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def reset_caches(self) -> bool:
        """Preempts running requests, which are computed again with the new weights."""
        return bool(self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    def announce(self, version: int) -> None:
        """What ``/weight_info`` says."""
        self._core.set_weight_version(str(version))


def remember_cpus() -> None:
    """Note which processors this process may use, before vLLM ties its threads to some of them."""
    global _cpus  # noqa: PLW0603 - one process, one set
    if _cpus is None and hasattr(os, "sched_getaffinity"):
        _cpus = frozenset(os.sched_getaffinity(0))


def cpus() -> frozenset[int] | None:
    """Processors for background threads; None where they cannot be told."""
    return _cpus
