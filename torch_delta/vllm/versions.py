"""Everything that depends on the version of vLLM, in one file: what we rely on, and where it is.

Supported are 0.30 to 0.33. `RELIED_ON` lists each thing of vLLM that this package calls, wraps or overrides, with the
parameters we pass; a test holds the installed vLLM, and recorded signatures of the other versions, against it.
Importing this module imports no vLLM.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_delta.errors import TorchDeltaError
from torch_delta.vllm.config import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import ModuleType

OLDEST = (0, 30)
NEWEST = (0, 33)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_ours = {BACKEND}


class Reliance(NamedTuple):
    """One thing of vLLM that we rely on.

    Attributes:
        module: dotted name.
        name: of the function, class or method in it.
        parameters: that we pass by name, or that our override gets by position.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


_TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = "vllm.model_executor.model_loader.reload"
_CLIENT = "vllm.v1.engine.async_llm"

RELIED_ON = (
    Reliance(f"{_TRANSFER}.factory", "WeightTransferEngineFactory.register_engine", ("name", "module_path_or_cls")),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.__init__", ("config", "vllm_config", "device", "model")),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.parse_init_info", ("init_dict",)),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.init_transfer_engine", ("init_info",)),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.start_weight_update"),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.update_weights", ("update_info",)),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.finish_weight_update"),
    Reliance(f"{_TRANSFER}.base", "WeightTransferEngine.shutdown"),
    Reliance(f"{_TRANSFER}.base", "WeightTransferInitRequest", ("init_info",)),
    Reliance(f"{_TRANSFER}.base", "WeightTransferUpdateRequest", ("update_info",)),
    Reliance(f"{_RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    Reliance(f"{_RELOAD}.layerwise", "finalize_layerwise_reload"),
    Reliance(f"{_RELOAD}.layerwise", "get_layerwise_info", ("layer",)),
    Reliance("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Reliance("vllm.v1.engine.core", "EngineCore.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Reliance("vllm.v1.engine.core", "EngineCore.set_weight_version", ("weight_version",)),
    Reliance("vllm.v1.worker.worker_base", "WorkerBase"),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.init_weight_transfer_engine", ("init_info",)),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.start_weight_update"),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.update_weights", ("update_info",)),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update"),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.sleep", ("level",)),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",)),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.reload_weights"),
    Reliance("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Reliance(_CLIENT, "AsyncLLM.collective_rpc", ("method", "args")),
    Reliance(_CLIENT, "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    Reliance(_CLIENT, "AsyncLLM.resume_generation"),
    Reliance(_CLIENT, "AsyncLLM.is_paused"),
    Reliance(_CLIENT, "AsyncLLM.init_weight_transfer_engine", ("request",)),
    Reliance(_CLIENT, "AsyncLLM.start_weight_update"),
    Reliance(_CLIENT, "AsyncLLM.update_weights", ("request",)),
    Reliance(_CLIENT, "AsyncLLM.finish_weight_update", ("weight_version",)),
    Reliance(_CLIENT, "AsyncLLM.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Reliance("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin.attach_router", ("app",)),
)
"""What we rely on in every supported version: workers, engine core, then the API process."""

OPTIONAL = (
    Reliance("vllm.v1.worker.gpu_worker", "Worker.reset_weights"),
    Reliance("vllm.v1.worker.gpu_worker", "Worker.discard", ("tags",)),
)
"""What some supported versions have, and we take care of where it is."""


def find(reliance: Reliance) -> Any:
    """The thing itself.

    Raises:
        ImportError, AttributeError: this vLLM has no such thing.
    """
    found: Any = importlib.import_module(reliance.module)
    for part in reliance.name.split("."):
        found = getattr(found, part)
    return found


def installed() -> str:
    """Version of the vLLM of this process."""
    vllm: ModuleType = importlib.import_module("vllm")
    return str(vllm.__version__)


def refusal(version: str) -> str:
    """Why a version of vLLM is not supported; empty when it is."""
    found = _VERSION.match(version)
    numbers = (int(found[1]), int(found[2])) if found is not None else None
    if numbers is not None and OLDEST <= numbers <= NEWEST:
        return ""
    return (
        f"torch_delta supports vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, this is {version}; install one "
        "of these, or a release of torch_delta that knows this one"
    )


def check_supported(version: str | None = None) -> None:
    """Refuse a vLLM that this release does not know.

    Raises:
        TorchDeltaError: names the version and what is supported.
    """
    version = installed() if version is None else version
    reason = refusal(version)
    if reason:
        raise TorchDeltaError(reason, got=version)


def look_after(backend: str) -> None:
    """Count another backend name as ours in this process: a framework's, whose engine is one around `Replica`."""
    _ours.add(backend)


def selected(vllm_config: Any) -> bool:
    """Whether an engine with this configuration uses our backend."""
    config = getattr(vllm_config, "weight_transfer_config", None)
    return config is not None and config.backend in _ours


# -- what the plugin puts into vLLM, when it is loaded and never later -------------------------------------------------


def register_engine(module: str, name: str) -> None:
    """Make the backend known. Again is fine; vLLM itself refuses a name that is taken."""
    factory = importlib.import_module(f"{_TRANSFER}.factory").WeightTransferEngineFactory
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, module, name)


def graft(methods: dict[str, Callable[..., Any]]) -> None:
    """Give every worker further methods that `collective_rpc` can name."""
    worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    for name, method in methods.items():
        setattr(worker, name, method)


def watch_workers(on_start: Callable[[Any], None]) -> None:
    """Hear of every worker of this process, whatever its backend, before it builds anything.

    Args:
        on_start: given the worker, which knows its ``vllm_config`` and nothing else; what it raises ends the start.
    """
    module = importlib.import_module("vllm.v1.worker.worker_base")
    original = module.WorkerBase.__init__
    if hasattr(original, "torch_delta"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        on_start(self)

    init.torch_delta = True  # type: ignore[attr-defined]
    module.WorkerBase.__init__ = init
    init_worker = getattr(getattr(module, "WorkerWrapperBase", None), "init_worker", None)
    if init_worker is not None:

        @functools.wraps(init_worker)
        def spared(self: Any, *args: Any, **kwargs: Any) -> Any:
            _spare_llvmlite()
            return init_worker(self, *args, **kwargs)

        module.WorkerWrapperBase.init_worker = spared


def check_engine(vllm_config: Any) -> None:
    """Refuse what an engine with our backend cannot be.

    Raises:
        TorchDeltaError: names the option.
    """
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise TorchDeltaError(
            "expert load balancing (enable_eplb) moves experts while the engine runs: no checkpoint element keeps its "
            "place, and a reload would put experts where they were at the start. Start without it, or without the "
            "torch_delta backend",
            option="enable_eplb",
        )


def wrap_collective_rpc(around: Callable[..., Any]) -> None:
    """Let `around(core, original, method, timeout, (args, kwargs))` answer remote calls of engines with our backend."""
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    original = core.collective_rpc
    if hasattr(original, "torch_delta"):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        if not selected(self.vllm_config):
            return original(self, method, timeout, args, kwargs)
        return around(self, functools.partial(original, self), method, timeout, (args, kwargs))

    collective_rpc.torch_delta = True  # type: ignore[attr-defined]
    core.collective_rpc = collective_rpc


def watch_weights(
    on_lost: Callable[[Any, str], None], on_sleep: Callable[[Any], None], on_wake: Callable[[Any], None]
) -> None:
    """Hear of everything by which vLLM itself takes weights away or replaces them, before it does.

    Args:
        on_lost: the weights of a worker go for good; told why.
        on_sleep: the memory of the weights goes, now or for a while.
        on_wake: it is back; called after.
    """

    def sleep(worker: Any, *, level: int = 1) -> None:
        on_sleep(worker)
        if level == 2:
            on_lost(worker, "the engine slept at level 2, which drops the weights")

    def discard(worker: Any, *, tags: Collection[str] = ()) -> None:
        if "weights" in tags:
            on_lost(worker, "the memory of the weights was discarded")

    def wake_up(worker: Any, *, tags: Collection[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            on_wake(worker)

    def replaced(reason: str) -> Callable[..., None]:
        return lambda worker, **_: on_lost(worker, reason)

    base = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    for name, before, after in (
        ("sleep", sleep, None),
        ("discard", discard, None),
        ("wake_up", None, wake_up),
        ("reload_weights", replaced("the weights were reloaded by vLLM"), None),
        ("reset_weights", replaced("the weights were reset"), None),
    ):
        original = getattr(base, name, None)
        if original is not None and not hasattr(original, "torch_delta"):
            setattr(base, name, _watched(original, before, after))


def _watched(original: Any, before: Callable[..., None] | None, after: Callable[..., None] | None) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not selected(self.vllm_config):
            return original(self, *args, **kwargs)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        given.pop("self")
        if before is not None:
            before(self, **given)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self, **given)
        return result

    method.torch_delta = True  # type: ignore[attr-defined]
    return method


# -- what a worker process needs ---------------------------------------------------------------------------------------


def prefixed_store(prefix: str) -> Any:
    """The key-value store through which the processes of this engine found each other, with keys of our own."""
    distributed = importlib.import_module("torch.distributed")
    return distributed.PrefixStore(prefix, distributed.group.WORLD.get_group_store())


def _spare_llvmlite() -> None:
    """Let an engine of this process start although numba is loaded (0.32 on CPU, in process).

    Before it builds a worker, vLLM asks every loaded module's values for ``vars()``, and llvmlite's library
    object answers any name with a function.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    table = getattr(getattr(ffi, "lib", None), "_fntab", None)
    if isinstance(table, dict):
        table.setdefault("__dict__", {})


def current_config(vllm_config: Any) -> Any:
    """Context in which vLLM's loaders find their configuration."""
    return importlib.import_module("vllm.config").set_current_vllm_config(vllm_config)


@contextlib.contextmanager
def plain_loading(model: Any) -> Iterator[None]:
    """Keep `load_weights` of a torchao engine from starting a reload of its own, which would swap live parameters."""
    wanted = getattr(model, "_do_torchao_reload", False)
    if not wanted:
        yield
        return
    model._do_torchao_reload = False
    try:
        yield
    finally:
        model._do_torchao_reload = wanted


def layerwise() -> Any:
    """The layerwise reload of vLLM."""
    return importlib.import_module(f"{_RELOAD}.layerwise")
