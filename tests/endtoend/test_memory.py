"""What publishing and following cost in memory: one copy of a rank's own shard at most, and else what changed.

Two sizes of model with the same number of changed elements: what should not depend on the model must not grow with it.
What compiling kernels takes is the same for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests._dist import run_ranks
from tests.endtoend import memory

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.dist]

SMALL, LARGE = 12, 48  # tensors of 4 MiB
GROWTH_BYTES = (LARGE - SMALL) * memory.TENSOR_BYTES
SLACK_BYTES = 64 << 20  # arenas of the allocator, stacks of threads, changed elements: about half is in use


class Runs:
    """Streams of both models, and what their trainers took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for size in (SMALL, LARGE):
            memory.write_base(self.base(size), size)

    def base(self, size: int) -> Path:
        return self.folder / f"base-{size}"

    def stream(self, size: int, mode: str, world_size: int = 1) -> Path:
        return self.folder / f"{mode}-{size}-{world_size}"

    def train(self, size: int, mode: str, world_size: int = 1) -> list[dict[str, int]]:
        ranks = run_ranks(
            memory.train,
            world_size,
            root=str(self.stream(size, mode, world_size)),
            base=str(self.base(size)),
            num_tensors=size,
            mode=mode,
            shard=world_size > 1,
        )
        for took in ranks:
            assert took["owned_bytes"] == size * memory.TENSOR_BYTES // world_size
            assert took["num_samples"] > 20, "the peak was looked for"
            assert took["num_changed"] > 0.9 * memory.CHANGED_PER_STEP
        return ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def persistent(runs: Runs) -> dict[int, dict[str, int]]:
    return {size: runs.train(size, "persistent")[0] for size in (SMALL, LARGE)}


def test_persistent_capture_keeps_one_copy_and_a_version_costs_what_changed(persistent) -> None:
    small, large = persistent[SMALL], persistent[LARGE]
    assert large["rest_bytes"] - small["rest_bytes"] < 1.25 * GROWTH_BYTES
    assert large["extra_bytes"] - small["extra_bytes"] < GROWTH_BYTES / 4


def test_transient_capture_keeps_nothing_and_holds_one_copy_during_the_step(runs: Runs) -> None:
    (small,), (large,) = (runs.train(size, "transient") for size in (SMALL, LARGE))
    assert large["rest_bytes"] - small["rest_bytes"] < GROWTH_BYTES / 4
    assert large["extra_bytes"] < large["owned_bytes"] + memory.TENSOR_BYTES + SLACK_BYTES


def test_no_rank_keeps_more_than_its_share(runs: Runs, persistent) -> None:
    """F49: rank 0 is a sender like the others, without a snapshot of the whole model."""
    alone = persistent[LARGE]
    for took in runs.train(LARGE, "persistent", 2):
        assert took["rest_bytes"] < alone["rest_bytes"] - alone["owned_bytes"] / 4
        assert took["extra_bytes"] < SLACK_BYTES


def test_a_follower_holds_what_changed_and_no_copy_of_the_model(runs: Runs, persistent, tmp_path: Path) -> None:
    """F51, F121: the working copy is a file that all processes of a host map; nobody has one of his own."""
    took = {
        size: run_ranks(
            memory.follow_rank,
            1,
            root=str(runs.stream(size, "persistent")),
            folder=str(tmp_path / f"{size}"),
            base=str(runs.base(size)),
        )[0]
        for size in persistent
    }
    for each in took.values():
        assert each["version"] == 3
        assert each["num_samples"] > 20
        assert each["num_changed"] > 1.8 * memory.CHANGED_PER_STEP
        assert each["extra_bytes"] < SLACK_BYTES
    assert took[LARGE]["extra_bytes"] - took[SMALL]["extra_bytes"] < GROWTH_BYTES / 4
