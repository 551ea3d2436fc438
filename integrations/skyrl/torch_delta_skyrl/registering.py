"""Taking the seat: our engines under the name `delta`, in vLLM's two factories, before SkyRL asks for it.

SkyRL registers its own engines only under names that are free, so whoever comes first stays. Three kinds of process
need it:

    vLLM's (servers, workers)   the entry point of `vllm.general_plugins` calls `register_receiver`
    trainer ranks (Ray actors)  `ray_hook` has every worker process of the cluster call `register_trainer`
    a script without Ray        calls `register`

In SkyRL 0.3.0 the trainers' seat is another one: `torch_delta_skyrl.selecting`.

Which processes, is decided by the environment variable ``TORCH_DELTA_SKYRL=1``; `register` sets it.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch_delta.errors import UnsupportedFormat
from torch_delta_skyrl import contract, selecting
from torch_delta_skyrl.importing import when_imported

ENABLED = "TORCH_DELTA_SKYRL"
"""Environment variable: ``1`` takes the seat, in every process it reaches."""
RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
"""Ray's variable that names a function from runtime environment to runtime environment."""

_FORWARDED = ("TORCH_DELTA_SKYRL", "TORCH_DELTA_ALLOWED_PATHS", "TORCH_DELTA_CHECKPOINT_ROOT", "TORCH_DELTA_BASE")
"""Beginnings of variables that every process of a Ray job is given as the driver has them."""
_FACTORY = "vllm.distributed.weight_transfer.factory"
_SETUP = "torch_delta_skyrl.registering.set_up_worker"
_SEATS = {
    "WeightTransferTrainerFactory": ("torch_delta_skyrl.trainer", "TrainerEngine"),
    "WeightTransferEngineFactory": ("torch_delta_skyrl.receiver", "ReceiverEngine"),
}


def register() -> None:
    """Take the seat in this process, and in every process it starts: Ray's workers, and vLLM's with them.

    Call it before `ray.init` and before SkyRL builds trainers or servers. Idempotent.

    Raises:
        UnsupportedFormat: a SkyRL this package does not know, or one that has taken its seat already.
    """
    contract.check_release()
    os.environ[ENABLED] = "1"
    os.environ.setdefault(RAY_HOOK, "torch_delta_skyrl.registering.ray_hook")
    register_trainer()
    if not contract.has_senders():  # its vLLM is older than any that can receive
        register_receiver()


def ray_hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """``RAY_RUNTIME_ENV_HOOK=torch_delta_skyrl.registering.ray_hook``: take the seat in every worker of a Ray job.

    Raises:
        UnsupportedFormat: the job has a worker set-up hook of its own; it must call `set_up_worker` itself.
    """
    env = dict(runtime_env or {})
    present = env.setdefault("worker_process_setup_hook", _SETUP)
    if present != _SETUP:
        raise UnsupportedFormat(
            f"this Ray job has a worker_process_setup_hook already ({present!r}); call "
            f"{_SETUP}() in it, and unset {RAY_HOOK}",
            got=str(present),
        )
    ours = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
    env["env_vars"] = {**ours, **(env.get("env_vars") or {}), ENABLED: "1"}
    return env


def set_up_worker() -> None:
    """What each worker process of a Ray job calls first: cheap, so that processes without weights do not pay.

    The factories are vLLM's, whose import takes seconds; the seats are taken when they are imported.
    """
    os.environ[ENABLED] = "1"
    if contract.has_senders():
        register_trainer()
    else:
        when_imported(_FACTORY, take_seats)


def vllm_plugin() -> None:
    """Entry point of `vllm.general_plugins`: does nothing unless ``TORCH_DELTA_SKYRL=1`` and SkyRL has engines."""
    if os.environ.get(ENABLED) == "1" and not contract.has_senders():
        register_receiver()


def register_trainer() -> None:
    """Register the trainer engine, or the strategy, where SkyRL looks for it.

    Raises:
        UnsupportedFormat: an unknown SkyRL, or the seat is taken.
    """
    contract.check_release()
    if contract.has_senders():
        when_imported(contract.SYNC, selecting.offer_strategy)
    else:
        _take("WeightTransferTrainerFactory")


def register_receiver() -> None:
    """Register the receiver engine where SkyRL looks for it, and have the engine core look after its calls.

    Raises:
        UnsupportedFormat: an unknown SkyRL, or the seat is taken.
    """
    contract.check_release()
    _take("WeightTransferEngineFactory")
    from torch_delta.vllm import plugin, versions
    from torch_delta_skyrl.core import watch_fetches

    versions.look_after(contract.BACKEND)
    plugin.register()
    watch_fetches()


def take_seats(_module: Any = None) -> None:
    """Both seats, in the factories as they are right after their import."""
    contract.check_release()
    for factory in _SEATS:
        _take(factory)


def _take(factory: str) -> None:
    registry: Any = getattr(importlib.import_module(_FACTORY), factory)
    module, name = _SEATS[factory]
    present = registry._registry.get(contract.BACKEND)
    if present is None:
        registry.register_engine(contract.BACKEND, module, name)
        registry._registry[contract.BACKEND].torch_delta = True
    elif not getattr(present, "torch_delta", False):
        raise UnsupportedFormat(
            f"{factory} has an engine named {contract.BACKEND!r} already, which is SkyRL's: call "
            "torch_delta_skyrl.register() before SkyRL builds trainers or servers"
        )
