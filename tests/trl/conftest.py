"""What the TRL tests share: a tiny chat model, a server that follows whatever stream a trainer names, TRL on a CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.servers import Server

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))  # grpo: the tiny model and what TRL needs on a CPU

HAS_TRL = importlib.util.find_spec("trl") is not None and importlib.util.find_spec("vllm") is not None
_IS_LANE = os.environ.get("TORCH_DELTA_LANE") == "vllm"

if HAS_TRL:
    from tests.vllm.engines import prepare_environment

    prepare_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_TRL or _IS_LANE:
        return
    for item in items:
        if "tests/trl/" in item.nodeid and item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.skip(reason="TRL and vLLM are not installed here; `make test-vllm` has them"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model; never write to it."""
    from grpo.tiny_chat import make

    return make(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which servers accept streams and keep checkpoints."""
    return tmp_path_factory.mktemp("trl-shared")


@pytest.fixture(scope="session")
def server(model: Path, shared: Path) -> Iterator[Server]:
    """One server for all tests that do not end it. Each test's stream begins at the model, which it reloads."""
    with start_server(model, shared) as served:
        yield served


@pytest.fixture
def stream(shared: Path, tmp_path: Path) -> Path:
    """Where servers may look for this test's stream."""
    return shared / tmp_path.name / "stream"


def start_server(model: Path, shared: Path, name: str = "server") -> Server:
    from tests.vllm.servers import Server

    return Server(
        model,
        log=shared / f"{name}.log",
        dev=True,  # what TRL itself asks a server
        environment={
            "TORCH_DELTA_CHECKPOINT_ROOT": str(shared / f"{name}-checkpoints"),
            "TORCH_DELTA_ALLOWED_PATHS": str(shared),
        },
        options={"served-model-name": str(model), "logprobs-mode": "processed_logprobs"},
    )
