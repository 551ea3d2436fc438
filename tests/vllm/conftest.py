"""What the vLLM tests share: checkpoints, and fresh engines to compare with. tests/lanes.py says where they run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.lanes import HAS_VLLM
from tests.vllm.engines import Engine, prepare_environment
from tests.vllm.rig import Rig
from tests.vllm.stand_ins import write_toy_checkpoint
from tests.vllm.tiny import PARAMETERS_ONLY, Versions, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.vllm.tiny import Bits

if HAS_VLLM:
    prepare_environment()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fresh:
    """What an engine that was just started from a checkpoint holds and says."""

    parameters: dict[str, Bits]
    greedy: list[list[int]] | None
    """None for families that this vLLM cannot run."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **options of write_checkpoint)`: its folder, written once per session; never write to it."""
    written: dict[str, Path] = {}

    def get(family: str, **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp(family) / "base", family, **options)
        return written[key]

    return get


@pytest.fixture(scope="session")
def fresh() -> Callable[..., Fresh]:
    """`fresh(folder, **engine options)`: an engine is started from the folder and closed; once per folder and session.

    By default our backend is selected (`delta=True`), so that weights are laid out as in the engine under test.
    """
    known: dict[str, Fresh] = {}

    def get(folder: Path, *, delta: bool = True, **options: Any) -> Fresh:
        key = repr((str(folder), delta, sorted(options.items())))
        if key not in known:
            with Engine(folder, delta=delta, **options) as engine:
                runs = not any(name in type(engine.model).__name__.lower() for name in PARAMETERS_ONLY)
                known[key] = Fresh(parameters=engine.parameters(), greedy=engine.greedy() if runs else None)
        return known[key]

    return get


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """`engine(folder, **options of Engine)`: with our backend, closed when the test ends."""
    started: list[Engine] = []

    def start(folder: Path, *, delta: bool = True, **options: Any) -> Engine:
        started.append(Engine(folder, delta=delta, **options))
        return started[-1]

    yield start
    for one in reversed(started):
        one.close()


@pytest.fixture
def toy_base(tmp_path: Path) -> Path:
    """A checkpoint that no model can be built from, for tests without vLLM."""
    return write_toy_checkpoint(tmp_path / "base")


@pytest.fixture
def rig(tmp_path: Path, toy_base: Path) -> Iterator[Rig]:
    """A replica's surroundings: a stream that starts at `toy_base`, and nothing running yet."""
    with Versions(toy_base, tmp_path / "stream") as versions:
        rig = Rig(tmp_path, toy_base, versions)
        try:
            yield rig
        finally:
            rig.close()
