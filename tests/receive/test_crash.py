"""Killed wherever two effects could be separated: whoever comes next finds whole weights of a known version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.receive.handmade import Trainer, read_folder, small_trainer
from torch_delta import crashpoints
from torch_delta.errors import ChainError, DigestMismatch
from torch_delta.receive import Follower, LocalCheckpoint, access, pull, retention

if TYPE_CHECKING:
    from pathlib import Path

# Only where several versions are taken at once, or a stream is continued by another: tests of those.
ELSEWHERE = {"receive.version_merged", "receive.patches_dropped"}
RECEIVE = sorted(point for point in crashpoints.POINTS - ELSEWHERE if point.startswith("receive."))

PULL = """
import sys
from torch_delta.receive import pull, retention
url, path, base, version, sync_after = sys.argv[1:]
retention._SYNC_AFTER_PATCHES = int(sync_after)
pull(url, path, base=base or None, version=int(version))
"""


def pull_and_die(
    trainer: Trainer, place: Path, at: str, *, base: Path | None, version: int, sync_after: int = 64
) -> bool:
    """Pull in another process that is killed at a crash point; whether it got there."""
    run = subprocess.run(
        [sys.executable, "-c", PULL, str(trainer.root), str(place), str(base or ""), str(version), str(sync_after)],
        env={**os.environ, crashpoints.ENVIRONMENT: at, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode in {0, -9}, run.stderr
    return run.returncode == -9


def check_whole(trainer: Trainer, place: Path, *, lowest: int | None) -> None:
    """A reader gets exact bits of the version that the checkpoint reports, at least `lowest`, or nothing at all."""
    checkpoint = LocalCheckpoint(place)
    try:
        with checkpoint.reading() as folder:
            version = checkpoint.version
            trainer.assert_at(folder, version if version is not None else 0)
            assert lowest is None or version >= lowest
    except ChainError:
        assert lowest is None
        assert [path.name for path in place.iterdir()] == [".torch_delta"]
    hidden = place / ".torch_delta"
    left = [path.name for path in hidden.iterdir()]
    assert not [name for name in left if name.startswith(("stage", "next", "install")) or name.endswith(".new")], left
    assert list((hidden / "tmp").iterdir()) == [], "F84: what dead processes left is swept"


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", RECEIVE)
def test_killed_while_following_from_a_base(tmp_path: Path, place: Path, point: str, nth: int) -> None:
    # rules R7, R8; F06, F08
    trainer = small_trainer(tmp_path / "stream").start()
    base = trainer.checkpoint(tmp_path / "base", 0, num_files=2)
    rng = np.random.default_rng(1)
    for _ in range(3):
        trainer.step(rng)
    died = pull_and_die(trainer, place, f"{point}:{nth}:kill", base=base, version=3, sync_after=1)
    once = {"receive.install_staged", "receive.install_begun", "receive.install_state", "receive.schema_kept"}
    assert died == (nth == 1 or point not in once | {"receive.weights_synced"}), (
        "the point was not where it is said to be"
    )
    check_whole(trainer, place, lowest=None)
    pull(str(trainer.root), place, base=base)
    trainer.assert_at(place, 3)
    LocalCheckpoint(place).verify()


@pytest.mark.parametrize("point", [point for point in RECEIVE if "install" in point])
@pytest.mark.parametrize("nth", [1, 2])
def test_killed_while_an_anchor_replaces_the_weights(tmp_path: Path, place: Path, point: str, nth: int) -> None:
    trainer = small_trainer(tmp_path / "stream").start()
    rng = np.random.default_rng(2)
    trainer.step(rng)
    pull(str(trainer.root), place, base=trainer.checkpoint(tmp_path / "base", 0))
    for _ in range(2):
        trainer.step(rng)
    trainer.anchor(3, num_files=2)
    trainer.forget(1, 3)
    died = pull_and_die(trainer, place, f"{point}:{nth}:kill", base=None, version=3)
    assert died == (nth == 1 or point in {"receive.install_file", "receive.install_state"})
    check_whole(trainer, place, lowest=1)
    assert pull(str(trainer.root), place).version == 3
    trainer.assert_at(place, 3)
    assert not (place / "model.safetensors").exists()


def test_killed_again_while_recovering(tmp_path: Path, place: Path) -> None:
    trainer = small_trainer(tmp_path / "stream").start()
    base = trainer.checkpoint(tmp_path / "base", 0)
    trainer.step(np.random.default_rng(3), density=0.5)
    assert pull_and_die(trainer, place, "receive.tensor_written:2:kill", base=base, version=1)
    assert (place / ".torch_delta" / "next.json").exists()
    torn = read_folder(place)
    assert any(not np.array_equal(torn[name], trainer.history[0][name]) for name in torn)
    assert any(not np.array_equal(torn[name], trainer.history[1][name]) for name in torn), "really torn"
    assert pull_and_die(trainer, place, "receive.tensor_written:3:kill", base=base, version=1)
    check_whole(trainer, place, lowest=1)


@pytest.mark.parametrize("loss", ["gone", "of another version", "cut off"])
def test_half_written_weights_without_their_patch_are_said_to_be_damaged(
    tmp_path: Path, place: Path, loss: str
) -> None:
    # F07: nothing on this host can complete them; an anchor can replace them
    trainer = small_trainer(tmp_path / "stream").start()
    base = trainer.checkpoint(tmp_path / "base", 0)
    trainer.step(np.random.default_rng(3), density=0.5)
    assert pull_and_die(trainer, place, "receive.tensor_written:2:kill", base=base, version=1)
    (patch,) = (place / ".torch_delta" / "patches").iterdir()
    if loss == "gone":
        patch.unlink()
    elif loss == "cut off":
        os.truncate(patch, patch.stat().st_size - 3)
    else:
        other = tmp_path / "other"
        trainer.step(np.random.default_rng(4))
        pull(str(trainer.root), other, base=base, version=2)
        (found,) = (path for path in (other / ".torch_delta" / "patches").iterdir() if path.name != patch.name)
        shutil.copy(found, patch)
    checkpoint = LocalCheckpoint(place)
    assert "half written" in checkpoint.damage
    with pytest.raises(DigestMismatch, match="cannot be used"), checkpoint.reading():
        pass
    with pytest.raises(ChainError, match="no path"):
        pull(str(trainer.root), place, timeout_s=5)
    trainer.anchor()
    assert pull(str(trainer.root), place).damage == ""
    trainer.assert_at(place, trainer.version)


def test_without_fsync_a_version_costs_no_sync_and_a_killed_process_is_still_repaired(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = small_trainer(tmp_path / "stream").start()
    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base", 0), fsync=False)
    rng = np.random.default_rng(9)
    with Follower(str(trainer.root)) as follower:
        list(follower.apply_to(checkpoint, until=0))
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        trainer.step(rng, density=0.5)
        list(follower.apply_to(checkpoint, until=1))
        assert synced == []
        trainer.step(rng, density=0.5)

        def die() -> None:
            raise KeyboardInterrupt

        with crashpoints.armed("receive.tensor_written", die, nth=2), pytest.raises(KeyboardInterrupt):
            list(follower.apply_to(checkpoint, until=2))
    with LocalCheckpoint(place).reading() as folder:
        trainer.assert_at(folder, 2)


def test_an_exception_while_writing_is_repaired_by_the_next_reader(tmp_path: Path, place: Path) -> None:
    # F06: torn weights are never handed out, in this process either
    trainer = small_trainer(tmp_path / "stream").start()
    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base", 0))
    trainer.step(np.random.default_rng(4), density=0.5)

    def fail() -> None:
        raise MemoryError

    with Follower(str(trainer.root)) as follower:
        with crashpoints.armed("receive.tensor_written", fail, nth=2), pytest.raises(MemoryError):
            list(follower.apply_to(checkpoint, until=1))
        assert checkpoint.version == 0
        with checkpoint.reading() as folder:
            assert checkpoint.version == 1
            trainer.assert_at(folder, 1)
        assert list(follower.apply_to(checkpoint, until=1)) == []


def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart of the machine: another boot id."""
    monkeypatch.setattr(access, "boot_id", lambda: "another boot")


@pytest.fixture
def at_three(tmp_path: Path, place: Path) -> tuple[Trainer, bytes]:
    """A checkpoint at version 3, and its weight file as it was at version 1."""
    trainer = small_trainer(tmp_path / "stream").start()
    base = trainer.checkpoint(tmp_path / "base", 0)
    rng = np.random.default_rng(5)
    for _ in range(3):
        trainer.step(rng)
    pull(str(trainer.root), place, base=base, version=1)
    old = (place / "model.safetensors").read_bytes()
    pull(str(trainer.root), place)
    return trainer, old


def lose_writes(place: Path, old: bytes) -> None:
    """What was not synced is gone: some pages are as they were at version 1."""
    half = len(old) // 2
    with (place / "model.safetensors").open("r+b") as stream:
        stream.write(old[:half])


def test_after_a_power_cut_the_redo_log_is_written_again(
    at_three: tuple[Trainer, bytes], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, old = at_three
    lose_writes(place, old)
    with pytest.raises(AssertionError):
        trainer.assert_at(place, 3)
    restarted(monkeypatch)
    checkpoint = LocalCheckpoint(place)
    with checkpoint.reading() as folder:
        assert checkpoint.version == 3
        trainer.assert_at(folder, 3)


@pytest.mark.parametrize("loss", ["patch gone", "patch damaged", "position damaged", "older than the log"])
def test_after_a_power_cut_that_lost_the_log_the_damage_is_said(
    at_three: tuple[Trainer, bytes], place: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    # R9, F07: and healed, once there is something to heal from
    trainer, old = at_three
    patch = place / ".torch_delta" / "patches" / f"{2:020d}.safetensors"
    lose_writes(place, bytes(len(old)) if loss == "older than the log" else old)
    if loss == "patch gone":
        patch.unlink()
    elif loss == "patch damaged":
        patch.write_bytes(patch.read_bytes()[:-3])
    elif loss == "position damaged":
        data = bytearray(patch.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        at = start + json.loads(data[8:start])["coo.index.u32"]["data_offsets"][0]
        data[at : at + 4] = b"\xff\xff\xff\x7f"  # far outside of any box
        patch.write_bytes(data)
    restarted(monkeypatch)
    checkpoint = LocalCheckpoint(place)
    with pytest.raises((DigestMismatch, ChainError), match="cannot be used"), checkpoint.reading():
        pass
    trainer.anchor(2)
    pull(str(trainer.root), place)
    trainer.assert_at(place, 3)


def test_patches_go_once_the_weights_are_on_disk_and_nobody_needs_them(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_SYNC_AFTER_PATCHES", 2)
    trainer = small_trainer(tmp_path / "stream").start()
    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base", 0))
    rng = np.random.default_rng(6)

    def kept() -> list[int]:
        trainer.step(rng)
        pull(str(trainer.root), place)
        return sorted(int(path.stem) for path in (place / ".torch_delta" / "patches").iterdir())

    assert [kept() for _ in range(4)] == [[1], [1, 2], [], [4]]
    with checkpoint.register_consumer("engine-0") as consumer:
        assert [kept() for _ in range(4)] == [[4, 5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
        consumer.applied(7)
        assert kept() == [8, 9]
        assert [len(checkpoint.patch(version)) > 0 for version in (8, 9)] == [True, True]
    assert kept() == [10]
    # a consumer that died without a word does not pin
    dead = checkpoint.register_consumer("engine-1", version=0)
    os.close(dead._lock._fd)
    dead._lock._fd = None
    kept()
    assert kept() == []


def test_patches_for_consumers_have_a_budget(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_SYNC_AFTER_PATCHES", 0)
    trainer = small_trainer(tmp_path / "stream").start()
    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base", 0), patch_budget_bytes=12_000)
    rng = np.random.default_rng(7)
    trainer.step(rng)
    with Follower(str(trainer.root)) as follower:
        list(follower.apply_to(checkpoint, until="head"))
        with checkpoint.register_consumer("slow"):
            for _ in range(6):
                trainer.step(rng)
            list(follower.apply_to(checkpoint, until="head"))
            sizes = [path.stat().st_size for path in (place / ".torch_delta" / "patches").iterdir()]
            assert 0 < sum(sizes) <= 12_000
            with pytest.raises(ChainError, match="reload"):
                checkpoint.patch(2)
            assert checkpoint.patch(7).version == 7


def test_a_base_is_never_written_even_if_its_copy_is_torn(tmp_path: Path, place: Path) -> None:
    trainer = small_trainer(tmp_path / "stream").start()
    base = trainer.checkpoint(tmp_path / "base", 0)
    frozen = tmp_path / "frozen"
    shutil.copytree(base, frozen)
    trainer.step(np.random.default_rng(8))
    assert pull_and_die(trainer, place, "receive.tensor_written:1:kill", base=base, version=1)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == {
        path.name: path.read_bytes() for path in frozen.iterdir()
    }
