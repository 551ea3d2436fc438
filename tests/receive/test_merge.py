"""Several pending versions in one step: the same bits as one by one, proved, written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.receive.handmade import Slice, Trainer, read_folder, small_trainer
from tests.receive.test_crash import check_whole, pull_and_die
from torch_delta.errors import ChainError, FormatError
from torch_delta.receive import Follower, LocalCheckpoint, merge, pull, scratch
from torch_delta.store import open_store
from torch_delta.testing.faults import Fault, FaultyStore, call

if TYPE_CHECKING:
    from pathlib import Path

    from torch_delta.receive.fetch import Wanted
    from torch_delta.store import Store


def follow(trainer: Trainer, checkpoint: LocalCheckpoint, **options: object) -> list[tuple[str, int | None, int]]:
    with Follower(str(trainer.root), **options) as follower:
        return [(r.kind, r.from_version, r.version) for r in follower.apply_to(checkpoint, until="head", timeout_s=20)]


@pytest.mark.parametrize("density", [0.02, 0.6])
@pytest.mark.parametrize("memory_bytes", [1 << 30, 1000])
def test_a_merged_run_ends_with_the_bits_of_the_last_version(
    trainer: Trainer,
    base: Path,
    place: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    density: float,
    memory_bytes: int,
) -> None:
    # F09: catching up costs what changed, not how many versions there were
    monkeypatch.setattr(scratch.Scratch.__init__, "__kwdefaults__", {"memory_bytes": memory_bytes})
    for _ in range(12):
        trainer.step(rng, density=density)
    checkpoint = LocalCheckpoint(place, base=base)
    assert follow(trainer, checkpoint) == [("delta", 0, 12)]
    trainer.assert_at(place, 12)
    checkpoint.verify()
    assert [(patch.since, patch.version) for patch in checkpoint.patches(0)] == [(0, 12)]
    with pytest.raises(ChainError, match="no patch for version 12"):
        checkpoint.patch(12)


def test_a_merged_patch_is_the_difference_and_nothing_else(trainer: Trainer, base: Path, place: Path) -> None:
    # elements that went back to their old bits drop out, whatever the encodings were
    rng = np.random.default_rng(3)
    first = trainer.bits["layer.weight"].copy()
    for encoding in ("coo", "xor", "dense", "xor"):
        noise = rng.integers(1, 1 << 16, first.shape, dtype=np.uint16)
        trainer.publish([[Slice("layer.weight", (0, 0), trainer.bits["layer.weight"] ^ noise, encoding)]])
    last = first.copy()
    last[5, 7] ^= 1
    trainer.publish([[Slice("layer.weight", (0, 0), last, "xor")]])
    checkpoint = LocalCheckpoint(place, base=base)
    assert follow(trainer, checkpoint, merge_from=2) == [("delta", 0, 5)]
    (patch,) = checkpoint.patches(0, 5)
    assert (patch.num_changed, len(patch)) == (1, 1)
    ((item,),) = patch.values()
    assert (list(item.positions), list(item.value)) == ([5 * 24 + 7], [last[5, 7]])
    trainer.assert_at(place, 5)


@pytest.mark.parametrize(("merge_from", "steps"), [(None, 3), (4, 3), (3, 1)])
def test_few_versions_are_taken_one_by_one(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator, merge_from: int | None, steps: int
) -> None:
    for _ in range(3):
        trainer.step(rng)
    assert len(follow(trainer, LocalCheckpoint(place, base=base), merge_from=merge_from)) == steps
    trainer.assert_at(place, 3)


def test_with_a_consumer_every_version_has_its_patch(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    trainer.step(rng)
    follow(trainer, checkpoint)
    with checkpoint.register_consumer("engine"):
        for _ in range(5):
            trainer.step(rng)
        assert follow(trainer, checkpoint) == [("delta", v - 1, v) for v in range(2, 7)]
        assert [checkpoint.patch(v).version for v in range(2, 7)] == [2, 3, 4, 5, 6]
        assert [patch.version for patch in checkpoint.patches(3)] == [4, 5, 6]


def test_one_bad_version_does_not_cost_the_good_ones_before_it(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    commits = [trainer.step(rng) for _ in range(6)]
    damaged = trainer.root / commits[3]["parts"][0]["key"]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    checkpoint = LocalCheckpoint(place, base=base)
    with pytest.raises(FormatError, match="sha256"):
        follow(trainer, checkpoint)
    assert checkpoint.version == 3
    trainer.assert_at(place, 3)
    trainer.anchor(5)
    assert follow(trainer, checkpoint) == [("anchor", 3, 5), ("delta", 5, 6)]


def test_a_wrong_base_is_found_before_anything_is_written(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    follow(trainer, checkpoint)
    for _ in range(5):
        trainer.step(rng, density=0.9, encodings=("xor",))
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x99")
    before = read_folder(place)
    checkpoint = LocalCheckpoint(place)
    with pytest.raises(ChainError), Follower(str(trainer.root), verify="never") as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=5))
    assert "layer.weight" in checkpoint.damage
    after = read_folder(place)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_fewer_bytes_win(trainer: Trainer, base: Path, place: Path, rng: np.random.Generator) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    follow(trainer, checkpoint)
    for _ in range(8):
        trainer.step(rng, density=0.9)
    trainer.anchor(7)
    assert follow(trainer, checkpoint) == [("anchor", 0, 7), ("delta", 7, 8)]
    for _ in range(2):
        trainer.step(rng, density=0.01)
    trainer.anchor(10)
    assert follow(trainer, checkpoint, merge_from=2) == [("delta", 8, 10)]
    trainer.assert_at(place, 10)


def test_retention_in_the_middle_of_a_run_means_plan_again(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F87
    checkpoint = LocalCheckpoint(place, base=base)
    follow(trainer, checkpoint)
    for _ in range(6):
        trainer.step(rng)
    trainer.anchor(4)
    store = FaultyStore(
        open_store(str(trainer.root)), [Fault("get", "parts/*", effect=call(lambda: trainer.forget(1, 4)))]
    )
    with Follower(store) as follower:
        reports = [(r.kind, r.version) for r in follower.apply_to(checkpoint, until="head", timeout_s=10)]
    store.assert_fired()
    assert reports[0] == ("anchor", 4)
    assert reports[-1][1] == 6
    trainer.assert_at(place, 6)


def test_parts_are_fetched_ahead_in_bounded_groups(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    whole = merge.fetch_all
    monkeypatch.setattr(merge, "_AHEAD_BYTES", 20_000)

    def fetch_all(store: Store, wanted: list[Wanted], *rest: Any) -> list[memoryview]:
        sizes.append(sum(item.stored_bytes for item in wanted))
        return whole(store, wanted, *rest)

    monkeypatch.setattr(merge, "fetch_all", fetch_all)
    for _ in range(20):
        trainer.step(rng)
    follow(trainer, LocalCheckpoint(place, base=base))
    assert len(sizes) > 2
    assert max(sizes) <= 20_000
    trainer.assert_at(place, 20)


@pytest.mark.parametrize(
    "point",
    [
        "receive.parts_fetched",
        "receive.version_merged",
        "receive.patch_kept",
        "receive.next_written",
        "receive.tensor_written",
        "receive.weights_written",
    ],
)
@pytest.mark.parametrize("nth", [1, 3])
def test_killed_in_the_middle_of_a_merged_run(tmp_path: Path, place: Path, point: str, nth: int) -> None:
    # rules R7, R8
    trainer = small_trainer(tmp_path / "stream").start()
    rng = np.random.default_rng(1)
    pull(str(trainer.root), place, base=trainer.checkpoint(tmp_path / "base", 0))
    for _ in range(6):
        trainer.step(rng, density=0.4)
    died = pull_and_die(trainer, place, f"{point}:{nth}:kill", base=None, version=6)
    assert died == (nth == 1 or point in {"receive.version_merged", "receive.tensor_written"})
    check_whole(trainer, place, lowest=0)
    begun = not died or point in {"receive.next_written", "receive.tensor_written", "receive.weights_written"}
    assert LocalCheckpoint(place).version == (6 if begun else 0)
    pull(str(trainer.root), place)
    trainer.assert_at(place, 6)
    LocalCheckpoint(place).verify()


def test_after_a_power_cut_a_merged_patch_is_written_again(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.receive.test_crash import restarted

    trainer = small_trainer(tmp_path / "stream").start()
    rng = np.random.default_rng(2)
    pull(str(trainer.root), place, base=trainer.checkpoint(tmp_path / "base", 0))
    old = (place / "model.safetensors").read_bytes()
    trainer.step(rng)
    pull(str(trainer.root), place)
    for _ in range(5):
        trainer.step(rng)
    pull(str(trainer.root), place)
    (place / "model.safetensors").write_bytes(old)
    restarted(monkeypatch)
    with LocalCheckpoint(place).reading() as folder:
        trainer.assert_at(folder, 6)
