"""The vLLM that is installed, and recorded signatures of the other supported ones, against what we rely on."""

from __future__ import annotations

import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest

from torch_delta.errors import TorchDeltaError
from torch_delta.vllm import plugin, unpacked, versions

RECORDED = sorted((Path(__file__).parent / "signatures").glob("*.json"))


def ids(reliance: versions.Reliance) -> str:
    return f"{reliance.module.rpartition('.')[2]}.{reliance.name}"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("reliance", versions.RELIED_ON, ids=ids)
def test_recorded_versions_have_what_we_rely_on(recorded: Path, reliance: versions.Reliance) -> None:
    """F67, F68."""
    found = json.loads(recorded.read_text())[f"{reliance.module}:{reliance.name}"]
    assert found is not None, f"vLLM {recorded.stem} has no {reliance.name} in {reliance.module}"
    if found:
        takes_any = any(name.startswith("*") for name in found)
        assert takes_any or set(reliance.parameters) <= set(found), f"vLLM {recorded.stem}: {found}"


def test_every_supported_version_is_recorded() -> None:
    minors = {int(path.stem.split(".")[1]) for path in RECORDED}
    assert minors == set(range(versions.OLDEST[1], versions.NEWEST[1] + 1))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM and what it imports
@pytest.mark.parametrize("reliance", versions.RELIED_ON, ids=ids)
def test_the_installed_version_has_what_we_rely_on(reliance: versions.Reliance) -> None:
    found = versions.find(reliance)
    if reliance.parameters:
        names = inspect.signature(found).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        assert takes_any or set(reliance.parameters) <= set(names)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_the_installed_version_is_supported() -> None:
    versions.check_supported()


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    versions.check_supported(version)


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "dev", "0.3.3"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(TorchDeltaError, match=rf"supports vLLM 0\.30 to 0\.33, this is {version}"):
        versions.check_supported(version)


def test_the_engine_of_an_unsupported_version_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_delta.vllm.refused import RefusedEngine

    monkeypatch.setattr(versions, "installed", lambda: "0.29.0")
    with pytest.raises(TorchDeltaError, match=r"this is 0\.29\.0"):
        RefusedEngine(None, None, None, None)


class Worker:
    """As much of vLLM's worker as is wrapped."""

    vllm_config = types.SimpleNamespace(weight_transfer_config=types.SimpleNamespace(backend="torch_delta"))

    def __init__(self) -> None:
        self.events: list[Any] = []

    def sleep(self, level: int = 1) -> None:
        self.events.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.events.append(f"wake {tags}")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.events.append(f"discard {tags}")

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("reload")


class Base:
    """As much of vLLM's worker base as is wrapped."""

    def __init__(self, vllm_config: Any, rank: int) -> None:
        self.vllm_config, self.rank = vllm_config, rank


def config(backend: str = "torch_delta", **parallel: Any) -> Any:
    return types.SimpleNamespace(
        weight_transfer_config=types.SimpleNamespace(backend=backend), parallel_config=types.SimpleNamespace(**parallel)
    )


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> type[Base]:
    """A worker that starts as vLLM's do, with our plugin loaded (twice: plugins may run again)."""
    kind = type("Starting", (Base,), {"__init__": Base.__init__})
    monkeypatch.setattr(versions.importlib, "import_module", lambda _: types.SimpleNamespace(WorkerBase=kind))
    for _ in range(2):
        versions.watch_workers(plugin._worker_starts)
    return kind


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of `keep_unpacked`, which is replaced; put a problem in it to be told of one."""
    calls: list[str] = []
    monkeypatch.setattr(unpacked, "keep_unpacked", lambda: calls.append("kept"))
    monkeypatch.setattr(unpacked, "problem", lambda: next((call for call in calls if call != "kept"), None))
    return calls


def test_weights_stay_unpacked_only_where_our_backend_is_selected(starting: type[Base], packing: list[str]) -> None:
    starting(config("nccl"), 0)
    assert packing == []
    starting(config(), rank=1)
    assert packing == ["kept"]


def test_a_cpu_on_which_weights_cannot_stay_unpacked_is_refused(starting: type[Base], packing: list[str]) -> None:
    packing.append("this vLLM packs CPU weights in a way that torch_delta does not know (no such name)")
    starting(config("nccl"), 0)
    with pytest.raises(TorchDeltaError, match="packed weights cannot be updated in place"):
        starting(config(), 0)


def test_experts_that_move_are_refused(starting: type[Base], packing: list[str]) -> None:
    starting(config(enable_eplb=False), 0)
    with pytest.raises(TorchDeltaError, match="enable_eplb"):
        starting(config(enable_eplb=True), 0)
    starting(config("nccl", enable_eplb=True), 0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    kind = type("Watched", (Worker,), dict(vars(Worker)))
    modules = {"vllm.v1.worker.gpu_worker": types.SimpleNamespace(Worker=kind)}
    monkeypatch.setattr(versions.importlib, "import_module", modules.__getitem__)
    for _ in range(2):  # plugins may run again
        versions.watch_weights(
            lambda worker, reason: worker.events.append(f"lost: {reason}"),
            lambda worker: worker.events.append("asleep"),
            lambda worker: worker.events.append("awake"),
        )
    return kind


def test_sleep_is_heard_of_before_and_waking_after(watched: type[Worker]) -> None:
    """F120."""
    worker = watched()
    worker.sleep()
    worker.wake_up()
    assert worker.events == ["asleep", "sleep 1", "wake None", "awake"]


@pytest.mark.parametrize("call", [lambda worker: worker.sleep(2), lambda worker: worker.sleep(level=2)])
def test_sleep_at_level_two_loses_the_weights(watched: type[Worker], call: Any) -> None:
    worker = watched()
    call(worker)
    assert worker.events == [
        "asleep",
        "lost: the engine slept at level 2, which drops the weights",
        "sleep 2",
    ]
    worker.wake_up(tags=["kv_cache"])
    assert "awake" not in worker.events


def test_what_replaces_weights_is_heard_of(watched: type[Worker]) -> None:
    worker = watched()
    worker.discard(("kv_cache",))
    assert worker.events == ["discard ('kv_cache',)"]
    worker.discard(("weights",))
    worker.reload_weights("path", is_checkpoint_format=True)
    assert worker.events[1:] == [
        "lost: the memory of the weights was discarded",
        "discard ('weights',)",
        "lost: the weights were reloaded by vLLM",
        "reload",
    ]


def test_engines_with_another_backend_are_left_alone(watched: type[Worker]) -> None:
    worker = watched()
    worker.vllm_config = types.SimpleNamespace(weight_transfer_config=None)
    worker.sleep(2)
    assert worker.events == ["sleep 2"]
