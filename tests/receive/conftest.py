"""A stream by hand, its base, and an empty place for a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.receive.handmade import Trainer, small_trainer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A stream at version 0."""
    return small_trainer(tmp_path / "stream").start()


@pytest.fixture
def base(trainer: Trainer, tmp_path: Path) -> Path:
    """The stream's base as a checkpoint folder."""
    return trainer.checkpoint(tmp_path / "base", 0)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the checkpoint goes."""
    return tmp_path / "checkpoint"
