"""Anchors: starting from one, catching up past retention, and refusing what is wrong with one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.receive.handmade import Trainer, sealed
from torch_delta.errors import ChainError, DigestMismatch, FormatError, TorchDeltaError
from torch_delta.receive import Follower, LocalCheckpoint, pull
from torch_delta.store import open_store
from torch_delta.testing.faults import Fault, FaultyStore, call

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


def kinds(trainer: Trainer, place: Path, **options: object) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []
    pull(str(trainer.root), place, on_report=lambda report: seen.append((report.kind, report.version)), **options)
    return seen


@pytest.mark.parametrize("num_files", [1, 3])
def test_an_empty_checkpoint_starts_from_the_newest_anchor(
    trainer: Trainer, place: Path, rng: np.random.Generator, num_files: int
) -> None:
    # rule R3
    trainer.anchor(0)
    for _ in range(4):
        trainer.step(rng)
    trainer.anchor(2, num_files=num_files)
    trainer.step(rng)
    assert kinds(trainer, place) == [("anchor", 2), ("delta", 3), ("delta", 4), ("delta", 5)]
    trainer.assert_at(place, 5)
    assert json.loads((place / "config.json").read_text()) == {"model_type": "handmade"}
    assert (place / "model.safetensors").exists() == (num_files == 1)


def test_an_anchor_beyond_the_wanted_version_is_not_used(
    trainer: Trainer, place: Path, rng: np.random.Generator
) -> None:
    trainer.anchor(0)
    for _ in range(3):
        trainer.step(rng)
    trainer.anchor(3)
    assert kinds(trainer, place, version=2) == [("anchor", 0), ("delta", 1), ("delta", 2)]


def test_a_reader_left_behind_by_retention_jumps_to_an_anchor(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F09, rule R3: bounded recovery
    trainer.step(rng)
    pull(str(trainer.root), place, base=base)
    for _ in range(4):
        trainer.step(rng)
    trainer.anchor(4, num_files=2)
    trainer.forget(1, 4)
    assert kinds(trainer, place) == [("anchor", 4), ("delta", 5)]
    trainer.assert_at(place, 5)
    assert not (place / "model.safetensors").exists(), "the files of the old layout are gone"
    assert len(LocalCheckpoint(place).patch(5)) > 0
    with pytest.raises(ChainError, match="reload"):
        LocalCheckpoint(place).patch(4)


def test_a_gap_without_an_anchor_says_how_to_go_on(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # rule R3
    trainer.step(rng)
    pull(str(trainer.root), place, base=base)
    for _ in range(3):
        trainer.step(rng)
    trainer.forget(1, 3)
    with pytest.raises(
        ChainError, match="Start again from a copy of the base, or have the writer publish an anchor"
    ) as caught:
        pull(str(trainer.root), place, timeout_s=5, version=4)
    assert caught.value.missing == 2
    trainer.assert_at(place, 1)


def test_a_lost_commit_is_a_gap_and_an_anchor_leads_around_it(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # rule R3: commits before and behind the hole are there, so only the hole itself tells
    for _ in range(4):
        trainer.step(rng)
    pull(str(trainer.root), place, base=base, version=1)
    trainer.forget(2, 2)
    with pytest.raises(ChainError, match="have the writer publish an anchor") as caught:
        pull(str(trainer.root), place, timeout_s=5)
    assert caught.value.missing == 2
    trainer.assert_at(place, 1)
    trainer.anchor(3)
    assert kinds(trainer, place) == [("anchor", 3), ("delta", 4)]
    trainer.assert_at(place, 4)


def test_retention_between_commit_and_part_means_plan_again(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F87, rule R5: the part vanishes after the commit that names it was read
    trainer.step(rng)
    checkpoint = pull(str(trainer.root), place, base=base)
    trainer.step(rng)
    trainer.step(rng)
    trainer.anchor(3)
    store = FaultyStore(
        open_store(str(trainer.root)), [Fault("get", "parts/*", effect=call(lambda: trainer.forget(1, 3)))]
    )
    with Follower(store) as follower:
        reports = list(follower.apply_to(checkpoint, until=3, timeout_s=10))
    store.assert_fired()
    assert [(report.kind, report.version) for report in reports] == [("anchor", 3)]
    trainer.assert_at(place, 3)


def test_all_commits_gone_an_anchor_is_enough(trainer: Trainer, place: Path, rng: np.random.Generator) -> None:
    trainer.step(rng)
    trainer.step(rng)
    trainer.anchor(2)
    trainer.forget(1, 2)
    assert kinds(trainer, place) == [("anchor", 2)]
    trainer.step(rng)
    assert kinds(trainer, place) == [("delta", 3)]
    trainer.assert_at(place, 3)


def test_a_damaged_anchor_is_passed_over(trainer: Trainer, place: Path, rng: np.random.Generator) -> None:
    trainer.anchor(0)
    trainer.step(rng)
    broken = trainer.anchor(1).removesuffix(".json")
    trainer.step(rng)
    weights = trainer.root / broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert kinds(trainer, place) == [("anchor", 0), ("delta", 1), ("delta", 2)]
    trainer.assert_at(place, 2)


@pytest.mark.parametrize(
    ("overrides", "error", "match"),
    [
        ({"digests": "00" * 16 * 7}, FormatError, "A2"),
        ({"commit_sha256": "ab" * 32}, FormatError, "A2"),
        ({"stream_id": "ab" * 16}, FormatError, "two streams"),
        ({"files": []}, FormatError, "A3"),
        ({"tensor_files": {}}, FormatError, "A4"),
    ],
)
def test_a_manifest_that_says_something_else(
    trainer: Trainer, place: Path, rng: np.random.Generator, overrides: dict, error: type[TorchDeltaError], match: str
) -> None:
    trainer.step(rng)
    trainer.anchor(1, **overrides)
    with pytest.raises(error, match=match):
        pull(str(trainer.root), place, timeout_s=5)
    assert LocalCheckpoint(place).version is None
    assert [path.name for path in place.iterdir()] == [".torch_delta"]


def test_a_tensor_in_another_file_than_the_manifest_says(
    trainer: Trainer, place: Path, rng: np.random.Generator
) -> None:
    # rule A4
    trainer.step(rng)
    key = trainer.anchor(1, num_files=2)
    manifest = json.loads((trainer.root / key).read_bytes().split(b"\n")[0])
    one, two = sorted(set(manifest["tensor_files"].values()))
    swapped = {name: one if file == two else two for name, file in manifest["tensor_files"].items()}
    trainer.put(key, sealed({**manifest, "tensor_files": swapped}))
    with pytest.raises(FormatError, match=r"lies in .*, it says .*A4") as caught:
        pull(str(trainer.root), place, timeout_s=5)
    assert (caught.value.rule, caught.value.key) == ("A4", key)
    assert LocalCheckpoint(place).version is None
    trainer.anchor(1)
    pull(str(trainer.root), place, timeout_s=5)
    trainer.assert_at(place, 1)


def test_an_anchor_of_version_0_that_is_not_the_base(trainer: Trainer, place: Path, base: Path) -> None:
    # rule A2
    key = trainer.anchor(0, digests="00" * 16 * 7)
    with pytest.raises(FormatError, match="not those of the stream's base") as caught:
        pull(str(trainer.root), place, version=0, timeout_s=5)
    assert (caught.value.rule, caught.value.key) == ("A2", key)
    pull(str(trainer.root), place, version=0, base=base, timeout_s=5)
    trainer.assert_at(place, 0)


def test_files_that_are_not_what_a_truthful_looking_manifest_says(
    trainer: Trainer, place: Path, rng: np.random.Generator
) -> None:
    # The commit is gone, so nothing but the digests of the bits themselves can tell.
    trainer.step(rng)
    key = trainer.anchor(1)
    manifest = json.loads((trainer.root / key).read_bytes().split(b"\n")[0])
    digests = manifest["digests"]
    trainer.put(key, sealed({**manifest, "digests": digests[32:64] + digests[:32] + digests[64:]}))
    trainer.forget(1, 1)
    with pytest.raises(DigestMismatch, match="2 tensors"):
        pull(str(trainer.root), place, timeout_s=5)
    assert LocalCheckpoint(place).version is None


@pytest.mark.parametrize("name", ["../../evil", "/evil", "sub/evil", ".evil", "evil\0"])
def test_a_hostile_file_name_in_a_manifest(trainer: Trainer, place: Path, rng: np.random.Generator, name: str) -> None:
    trainer.step(rng)
    key = trainer.anchor(1)
    manifest = json.loads((trainer.root / key).read_bytes().split(b"\n")[0])
    manifest["files"][0]["name"] = name
    trainer.put(key, sealed(manifest))
    with pytest.raises(FormatError, match="A3"):
        pull(str(trainer.root), place, timeout_s=5)
    assert not list(place.parent.rglob("evil"))


def test_an_anchor_of_version_0_written_before_the_stream(
    tmp_path: Path, place: Path, rng: np.random.Generator
) -> None:
    # rule A2, F103: version 0 is explicit
    from tests.receive.handmade import small_trainer

    trainer = small_trainer(tmp_path / "early")
    trainer.anchor(0)
    trainer.start(kind="anchor", name="0")
    trainer.step(rng)
    assert kinds(trainer, place) == [("anchor", 0), ("delta", 1)]
    trainer.assert_at(place, 1)


@pytest.mark.parametrize("beside", ["nothing", "another stream"])
def test_a_successor_that_is_not_there_is_an_error(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator, beside: str
) -> None:
    from tests.receive.handmade import small_trainer

    if beside == "another stream":
        other = small_trainer(trainer.root.with_name("run-8")).start()
    for _ in range(3):
        trainer.step(rng)
    trainer.put(
        "successor.json",
        sealed(
            {
                "format_version": [1, 0],
                "stream_id": trainer.stream_id,
                "version": 2,
                "commit_sha256": trainer.parents[2],
                "root": "run-8",
                "successor_id": "cd" * 16,
                "info": {},
            }
        ),
    )
    checkpoint = LocalCheckpoint(place, base=base)
    seen = []
    with (
        Follower(str(trainer.root), poll_interval_s=0.01) as follower,
        pytest.raises(ChainError, match="'run-8' beside it, but") as caught,
    ):
        seen += [report.version for report in follower.apply_to(checkpoint, timeout_s=10)]
    assert caught.value.successor == "run-8"
    if beside == "another stream":
        assert (caught.value.expected, caught.value.got) == ("cd" * 16, other.stream_id)
    assert checkpoint.version == 2, "version 3 is not part of the history that goes on"
    trainer.assert_at(place, 2)
