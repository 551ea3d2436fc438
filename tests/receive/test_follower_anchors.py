"""Anchors that a follower builds off the trainer: what it uploads, what it copies, and where it may be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.receive.handmade import Slice, Trainer, read_folder, sealed
from torch_delta import crashpoints
from torch_delta.config import RetentionConfig
from torch_delta.errors import ChainError
from torch_delta.receive import LocalCheckpoint, pull
from torch_delta.receive.anchoring import upload_anchor
from torch_delta.store import LocalStore
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage
from torch_delta.testing.faults import Fault, FaultyStore

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from torch_delta.format.anchor import AnchorManifest


def folder_of(trainer: Trainer, manifest: AnchorManifest) -> Path:
    return trainer.root / manifest.key.removesuffix(".json")


def followed(trainer: Trainer, tmp_path: Path, place: Path) -> LocalCheckpoint:
    """A checkpoint in three files, at the newest version."""
    return pull(str(trainer.root), place, base=trainer.checkpoint(tmp_path / "three", 0, num_files=3))


def test_a_checkpoint_of_another_history_makes_no_anchor(
    trainer: Trainer, tmp_path: Path, place: Path, rng: np.random.Generator
) -> None:
    # rule A2: the commit of its version is not the one this folder took
    trainer.step(rng)
    checkpoint = followed(trainer, tmp_path, place)
    path = trainer.root / f"commits/{1:020d}.json"
    path.write_bytes(sealed({**json.loads(path.read_bytes().split(b"\n")[0]), "info": {"somebody": "else"}}))
    with pytest.raises(ChainError, match="version 1 is another commit than the one this checkpoint is at"):
        upload_anchor(checkpoint, Stream(LocalStore(trainer.root)))
    assert not (trainer.root / "anchors").exists()
    trainer.assert_at(place, 1)


class Refusing(FaultyStore):
    """A store that cannot copy."""

    def copy(self, source: str, key: str) -> None:
        del source, key
        self.calls["copy"] += 1


@pytest.mark.parametrize("cannot", [None, "refuses", "fails"])
def test_files_that_did_not_change_are_copied_and_not_uploaded(
    trainer: Trainer, tmp_path: Path, place: Path, rng: np.random.Generator, cannot: str | None
) -> None:
    trainer.step(rng)
    checkpoint = followed(trainer, tmp_path, place)
    first = upload_anchor(checkpoint, Stream(LocalStore(trainer.root)))
    changed = trainer.bits["layer.bias"] ^ 1
    trainer.publish([[Slice("layer.bias", (0,), changed, "coo")]])
    pull(str(trainer.root), place)
    inner = LocalStore(trainer.root)
    store: FaultyStore = Refusing(inner) if cannot == "refuses" else FaultyStore(inner)
    if cannot == "fails":
        store.add(Fault("copy", "anchors/*", times=None))
    uploaded: list[int] = []
    second = upload_anchor(checkpoint, Stream(store), on_bytes=uploaded.append)
    store.assert_fired()
    touched = {second.tensor_files["layer.bias"]}
    names = {file.name for file in second.files}
    assert len(names) == 3 + 2, "three of weights, the index and the configuration"
    assert store.calls["copy"] == len(names - touched)
    # Its own files and the manifest are all that is put.
    assert store.calls["put_new"] == (len(names) if cannot in {"refuses", "fails"} else len(touched)) + 1
    assert sum(uploaded) == sum(file.stored_bytes for file in second.files), "progress counts what was copied as well"
    assert not {file.key for file in first.files} & {file.key for file in second.files}
    for manifest, version in ((first, 1), (second, 2)):
        trainer.assert_at(folder_of(trainer, manifest), version)
    for path in folder_of(trainer, first).iterdir():
        path.unlink()  # retention takes the first: the second has files of its own
    trainer.assert_at(folder_of(trainer, second), 2)
    empty = tmp_path / "empty"
    assert pull(str(trainer.root), empty).version == 2
    trainer.assert_at(empty, 2)


ANCHOR = "import sys; from torch_delta.cli import main; sys.exit(main(['anchor', *sys.argv[1:]]))"


@pytest.mark.parametrize("nth", range(1, 8))
def test_killed_anywhere_an_anchor_exists_in_full_or_not_at_all(
    trainer: Trainer, tmp_path: Path, place: Path, rng: np.random.Generator, nth: int
) -> None:
    # rule A1; F103: three files of weights, an index and a configuration; the sixth object is the manifest
    trainer.step(rng)
    followed(trainer, tmp_path, place).close()
    before = {path for path in trainer.root.rglob("*") if path.is_file()}
    run = subprocess.run(
        [sys.executable, "-c", ANCHOR, str(trainer.root), str(place)],
        env={**os.environ, crashpoints.ENVIRONMENT: f"store.linked:{nth}:kill", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == (-9 if nth <= 6 else 0), run.stderr
    stream = Stream(LocalStore(trainer.root))
    if nth < 6:
        assert stream.anchors() == ()
        assert len([*stream.store.list("anchors/")]) == nth
        report = collect_garbage(stream, RetentionConfig(grace_s=0))
        assert (report.num_orphans, report.failures) == (nth, ())
        left = {path for path in trainer.root.rglob("*") if path.is_file()} - before
        assert {path.parent.name for path in left} == {"claims"}, "F84: no file and no temporary one is left"
    else:
        (anchor,) = stream.anchors()
        assert stream.anchor(anchor).version == 1
    manifest = upload_anchor(LocalCheckpoint(place), stream)
    empty = tmp_path / "empty"
    assert pull(str(trainer.root), empty).version == 1
    trainer.assert_at(empty, 1)
    assert read_folder(folder_of(trainer, manifest)).keys() == read_folder(place).keys()
