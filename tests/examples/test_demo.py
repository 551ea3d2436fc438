"""The demo: that it ends with EXACT when all is well, and cannot end well when something is not."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples.demo.compare import differences
from examples.demo.sides import DemoFailed, Sides
from examples.demo.table import Table
from examples.demo.text import sentence_pairs

ROOT = Path(__file__).resolve().parents[2]
SLEEP = "import time; time.sleep(600)"


def run_demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.dist
def test_it_ends_with_exact(tmp_path: Path) -> None:
    done = run_demo("--out", str(tmp_path / "out"), "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) == 8]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert any(line.startswith("EXACT ") for line in lines)
    served = tmp_path / "out" / "follower"
    assert differences(served, tmp_path / "out" / "trainer")[0] == []
    assert differences(served, tmp_path / "out" / "base")[0] != []  # it did train


@pytest.mark.slow
@pytest.mark.dist
def test_a_trainer_that_dies_fails_it(tmp_path: Path) -> None:
    done = run_demo("--out", str(tmp_path / "out"), "--steps", "3", TORCH_DELTA_CRASH_AT="publish.committed:2:kill")
    assert done.returncode == 1
    assert "FAILED: the trainer ended with status" in done.stderr
    assert "EXACT" not in done.stdout


def test_sides_hand_over_what_is_reported_and_keep_the_rest() -> None:
    with Sides({"a": ["-c", "print('noise'); print('{\"x\": 1}')"], "b": ["-c", "print('{\"x\": 2}')"]}, 60.0) as sides:
        assert sorted(sides.events(), key=str) == [("a", {"x": 1}), ("b", {"x": 2})]


def test_a_side_that_fails_is_quoted_and_the_other_is_ended() -> None:
    started = time.monotonic()
    with (
        pytest.raises(DemoFailed, match=r"the b ended with status 3:\n  b \| last words"),
        Sides(
            {"a": ["-c", "import time; time.sleep(600)"], "b": ["-c", "print('last words'); exit(3)"]}, 60.0
        ) as sides,
    ):
        list(sides.events())
    assert time.monotonic() - started < 60


def test_a_side_that_is_killed_fails_it() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(DemoFailed, match="the a ended with status -9"), Sides({"a": ["-c", code]}, 60.0) as sides:
        list(sides.events())


def test_silence_fails_it() -> None:
    with (
        pytest.raises(DemoFailed, match=r"nothing happened for 0.5 s; still running:\n  a \| \(said nothing\)"),
        Sides({"a": ["-c", SLEEP]}, 0.5) as sides,
    ):
        list(sides.events())


def write(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_compare_counts_bytes_and_finds_nothing_in_equal_folders(tmp_path: Path) -> None:
    tensors = {"a": np.array([np.nan, -0.0, 1.0], np.float32), "b": np.zeros((2, 2), np.uint16)}
    assert differences(write(tmp_path / "l", **tensors), write(tmp_path / "r", **tensors)) == ([], 20)


def test_compare_names_every_difference(tmp_path: Path) -> None:
    left = write(
        tmp_path / "l",
        zero=np.array([0.0], np.float32),
        shape=np.zeros((2, 1), np.uint8),
        dtype=np.zeros(2, np.uint8),
        ours=np.zeros(1, np.uint8),
    )
    right = write(
        tmp_path / "r",
        zero=np.array([-0.0], np.float32),  # equal as numbers
        shape=np.zeros((1, 2), np.uint8),
        dtype=np.zeros(2, np.int8),
        theirs=np.zeros(1, np.uint8),
    )
    found, _ = differences(left, right)
    assert found == [
        f"ours: only in {left}",
        f"theirs: only in {right}",
        "dtype: U8 (2,) against I8 (2,)",
        "shape: U8 (2, 1) against U8 (1, 2)",
        "zero: 1 of 4 bytes differ",
    ]


def test_the_table_waits_for_both_sides_and_shows_merged_versions() -> None:
    published = {
        "num_changed": 10,
        "num_elements": 1000,
        "stored_bytes": 20,
        "full_bytes": 2000,
        "step_s": 0.1,
        "capture_s": 0.2,
        "receipts_s": 0.4,
        "commit_s": 0.1,
    }
    followed = {"fetch_s": 0.01, "decode_s": 0.02, "verify_s": 0.0, "apply_s": 0.03}
    shown = io.StringIO()
    with redirect_stdout(shown):
        table = Table()
        table.add("trainer", {**published, "version": 1})
        assert table.num_printed == 0
        table.add("follower", {**followed, "version": 1})
        assert table.num_printed == 1
        table.add("follower", {**followed, "version": 3})  # caught up over two
        table.add("trainer", {**published, "version": 2})
        table.add("trainer", {**published, "version": 3, "stored_bytes": 0})
    rows = [line.split() for line in shown.getvalue().splitlines()[1:]]
    assert rows == [
        ["1", "1.000%", "20", "100", "0.300", "0.500", "0.010", "0.050"],
        ["2", "1.000%", "20", "100", "0.300", "0.500", "with", "3", "with", "3"],
        ["3", "1.000%", "0", "-", "0.300", "0.500", "0.010", "0.050"],
    ]


def test_the_text_is_enough_and_always_in_the_same_order() -> None:
    pairs = sentence_pairs(seed=0)
    assert len(pairs) >= 300
    assert pairs == sentence_pairs(seed=0) != sentence_pairs(seed=1)
    assert all(len(sentence.split()) >= 8 for pair in pairs for sentence in pair)
