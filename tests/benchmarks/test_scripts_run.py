"""The benchmark scripts still run and still measure what they say, at a size that proves nothing about speed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(tmp_path: Path, script: str, *arguments: str) -> tuple[dict, subprocess.CompletedProcess[str]]:
    """Run a script the way a person does; its JSON and what it printed."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--work", str(tmp_path), "--json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(result.read_text(encoding="utf-8")), run


OURS = {"torch_delta", "torch_delta (no fsync)"}


def check_publish_follow(result: dict, followers: list[set[str]]) -> None:
    (trace,) = result["traces"]
    assert 0 < trace["changed"] < trace["elements"]
    assert [set(side["follow_s"]) for side in trace["sides"]] == followers
    for side in trace["sides"]:
        assert side["wire_bytes"] > 0
        for seconds in (side["publish_s"], *side["follow_s"].values()):
            assert len(seconds) == 3
            assert min(seconds) > 0


def test_publish_follow_measures_both_durabilities_and_says_why_skyrl_is_absent(tmp_path: Path) -> None:
    result, run = run_script(tmp_path, "publish_follow.py", "--small", "--repeats", "3", "--no-skyrl")
    check_publish_follow(result, [OURS])
    fsyncs = result["traces"][0]["sides"][0]["fsyncs"]
    assert fsyncs["torch_delta (no fsync)"] == 0
    assert fsyncs["torch_delta"] > 0
    assert fsyncs["publish"] > 0
    assert "SkyRL side skipped: left out by --no-skyrl" in run.stderr


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="needs SkyRL (benchmarks/skyrl_env.sh)")
def test_publish_follow_beside_skyrl(tmp_path: Path) -> None:
    result, run = run_script(tmp_path, "publish_follow.py", "--small", "--repeats", "3")
    check_publish_follow(result, [{"SkyRL"}, OURS])
    assert "**median**" in run.stdout


@pytest.mark.slow
def test_trainer_overhead_measures_every_mode(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result, run = run_script(tmp_path, "trainer_overhead.py", "--small", "--repeats", "2", "--dtypes", "bf16")
    measured = result["bf16"]
    assert set(measured["times_s"]) == set(measured["memory"]) == {"bare", "transient", "persistent"}
    for times in measured["times_s"].values():
        assert len(times["full"]) == 2
        assert min(times["full"]) > 0
    assert "| transient |" in run.stdout
