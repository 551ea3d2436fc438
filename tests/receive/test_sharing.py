"""Several processes and threads at one checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.receive.handmade import Trainer, read_folder, small_trainer
from torch_delta import crashpoints
from torch_delta.errors import CheckpointBusy, DeadlineExceeded
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.receive.access import exclusive
from torch_delta.receive.state import Layout

FOLLOW = """
import json, sys
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store import open_store
url, path, base, until = sys.argv[1:]
store = open_store(url)
asked = {"get": 0, "stat": 0}
def counted(name, original):
    def call(key, *args, **named):
        asked[name] += key.startswith("parts/") or name == "stat"
        return original(key, *args, **named)
    return call
for name in asked:
    setattr(store, name, counted(name, getattr(store, name)))
checkpoint = LocalCheckpoint(path, base=base)
print("ready", flush=True)
sys.stdin.readline()
with Follower(store, poll_interval_s=0.01, most_poll_interval_s=0.05) as follower:
    steps = follower.apply_to(checkpoint, until=int(until), timeout_s=60)
    reports = [(r.version, r.from_version, r.kind) for r in steps]
print(json.dumps([reports, asked, checkpoint.version]))
"""

READ = """
import sys
import numpy as np
from pathlib import Path
from torch_delta.receive import LocalCheckpoint
from tests.receive.handmade import read_folder
path, last = sys.argv[1:]
checkpoint = LocalCheckpoint(path)
print("ready", flush=True)
seen = set()
while True:
    with checkpoint.reading() as folder:
        bits, version = read_folder(Path(folder)), checkpoint.version
    marks = {int(b.reshape(-1)[0]) for b in bits.values()} | {int(b.reshape(-1)[-1]) for b in bits.values()}
    assert marks == {version}, (marks, version)
    seen.add(version)
    if version == int(last):
        break
print(len(seen))
"""


def start(code: str, *args: object) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_four_processes_do_the_work_once(tmp_path: Path, place: Path) -> None:
    # "one writer per host": also the copy of the base and every download happen once
    trainer = small_trainer(tmp_path / "stream").start()
    base = trainer.checkpoint(tmp_path / "base", 0)
    rng = np.random.default_rng(0)
    for _ in range(2):
        trainer.step(rng)
    processes = [start(FOLLOW, trainer.root, place, base, 5) for _ in range(4)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for _ in range(3):
        trainer.step(rng)
    answers = [json.loads(finish(process)) for process in processes]
    done = sorted(version for reports, _, _ in answers for version, _, kind in reports if kind == "delta")
    assert done == [1, 2, 3, 4, 5]
    assert sum(asked["get"] for _, asked, _ in answers) == sum(1 for _ in trainer.root.glob("parts/*/*"))
    for reports, _, version in answers:
        versions = [version for version, _, _ in reports]
        assert versions == sorted(set(versions))
        assert version == 5
    trainer.assert_at(place, 5)


def test_readers_never_see_a_torn_file(tmp_path: Path, place: Path) -> None:
    # F108: every element carries its version; a reader that saw two versions in one read would notice
    bits = {f"t{number}": np.zeros((64, 256), "<u2") for number in range(6)}
    trainer = Trainer(tmp_path / "stream", dict.fromkeys(bits, "BF16"), bits).start()
    from tests.receive.handmade import Slice

    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base", 0))
    with Follower(str(trainer.root)) as follower:
        list(follower.apply_to(checkpoint, until=0))
        readers = [start(READ, place, 25) for _ in range(2)]
        for version in range(1, 26):
            encoding = ("coo", "xor", "dense")[version % 3]
            new = {name: np.full_like(old, version) for name, old in trainer.bits.items()}
            trainer.publish([[Slice(name, (0, 0), value, encoding) for name, value in new.items()]])
            list(follower.apply_to(checkpoint, until=version, timeout_s=60))
    for reader in readers:
        assert int(finish(reader)) >= 1


def test_a_reader_holds_the_files_still_while_the_next_version_is_prepared(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F108: download and decode go on, only the write waits
    checkpoint = LocalCheckpoint(place, base=base)
    trainer.step(rng)
    prepared, done = threading.Event(), threading.Event()

    def follow() -> None:
        with Follower(str(trainer.root)) as follower:
            list(follower.apply_to(LocalCheckpoint(place), until=1, timeout_s=60))
        done.set()

    with crashpoints.armed("receive.patch_kept", prepared.set):
        with checkpoint.reading() as folder:
            thread = threading.Thread(target=follow)
            thread.start()
            assert prepared.wait(timeout=30)
            assert not done.is_set()
            assert checkpoint.version == 0
            trainer.assert_at(folder, 0)
        thread.join(timeout=60)
    assert done.is_set()
    assert checkpoint.version == 1
    trainer.assert_at(place, 1)


def test_a_reader_that_stays_is_named_and_nothing_is_half_done(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    trainer.step(rng)
    with Follower(str(trainer.root)) as follower:
        list(follower.apply_to(checkpoint, until=0))
        with checkpoint.reading() as folder:
            with pytest.raises(DeadlineExceeded, match="change the weights") as caught:
                list(follower.apply_to(checkpoint, until=1, timeout_s=0.2))
            assert str(os.getpid()) in caught.value.peer
            assert checkpoint.version == 0
            trainer.assert_at(folder, 0)
        list(follower.apply_to(checkpoint, until=1))
    trainer.assert_at(place, 1)


def test_a_second_writer_is_told_about_the_first(trainer: Trainer, base: Path, place: Path) -> None:
    checkpoint, other = LocalCheckpoint(place, base=base), LocalCheckpoint(place)
    with checkpoint.writing(purpose="download version 9"):
        with pytest.raises(CheckpointBusy, match="download version 9") as caught, other.writing(timeout_s=0):
            pass
        assert caught.value.path == str(place)
        with other.reading() as folder:  # a writer that only downloads is in nobody's way
            trainer.assert_at(folder, 0)


def test_a_consumer_finds_the_patches_between_its_version_and_the_checkpoints(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    with Follower(str(trainer.root)) as follower:
        trainer.step(rng)
        list(follower.apply_to(checkpoint, until="head"))
        with checkpoint.reading() as folder, checkpoint.register_consumer("engine-0") as engine:
            live = {name: bits.copy() for name, bits in read_folder(folder).items()}
        assert engine.version == 1
        for _ in range(3):
            trainer.step(rng)
        list(follower.apply_to(checkpoint, until="head"))
        for version in (2, 3, 4):
            for tensor, slices in checkpoint.patch(version).items():
                for box, positions, value in slices:
                    window = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
                    inside = live[trainer.names[tensor]][window].copy().reshape(-1)
                    inside[slice(None) if positions is None else positions] = value
                    live[trainer.names[tensor]][window] = inside.reshape(box.shape)
    for name, bits in live.items():
        np.testing.assert_array_equal(bits, trainer.history[4][name])


def test_copying_a_working_copy_holds_it_still(trainer: Trainer, base: Path, place: Path, tmp_path: Path) -> None:
    # A working copy may itself be somebody's base: its hidden folder stays behind, and a writer cannot tear the copy.
    first = LocalCheckpoint(place, base=base)
    with first.writing(), exclusive(Layout(place), 1), pytest.raises(DeadlineExceeded):
        LocalCheckpoint(tmp_path / "second", base=place, timeout_s=0.05)
    LocalCheckpoint(tmp_path / "second", base=place)
    trainer.assert_at(tmp_path / "second", 0)


def test_a_hub_cache_base_is_copied_through_its_links(
    trainer: Trainer, base: Path, place: Path, tmp_path: Path, monkeypatch
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir()
    for path in base.iterdir():
        path.chmod(0o444)
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (snapshot / "1_Pooling" / "config.json").write_text("{}")
    (snapshot / "pytorch_model.bin").write_bytes(b"other weights, never updated")
    asked: list[tuple] = []
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **k: (asked.append((name, k["revision"])), str(snapshot))[1]
    )
    LocalCheckpoint(place, base="someone/model@abc")
    assert asked == [("someone/model", "abc")]
    assert sorted(
        str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and ".torch" not in str(path)
    ) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
    ]
    assert not (place / "model.safetensors").is_symlink()
    with (place / "model.safetensors").open("r+b"):
        pass  # writable although the blob is not
    trainer.assert_at(place, 0)
