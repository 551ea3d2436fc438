"""The codec's benchmark scripts still run, at a size that proves nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def output_of(*command: str) -> str:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / command[0]), *command[1:]],
        capture_output=True, text=True, timeout=120, check=False, cwd=BENCHMARKS.parent, env={"PYTHONPATH": "."},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_digest(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    output = output_of("digest.py", "--mib", "1", "--repeats", "2", "--trials", "5", "--json", str(result))
    numbers = json.loads(result.read_text())
    assert len(numbers["full"]) == 9
    assert all(row[0] in output for row in numbers["full"])
    assert [row[1:] for row in numbers["noticed"][1:]] == [["5/5"] * 6] * 2


@pytest.mark.slow
def test_changes() -> None:
    assert "diff, compiled" in output_of("changes.py", "--mib", "1", "--repeats", "2")
