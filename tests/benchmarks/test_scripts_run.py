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


OURS = [{f"torch_delta {profile}", f"torch_delta {profile} (no fsync)"} for profile in ("small", "fast")]


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
    check_publish_follow(result, OURS)
    for profile, side in zip(("small", "fast"), result["traces"][0]["sides"], strict=True):
        assert side["fsyncs"][f"torch_delta {profile} (no fsync)"] == 0
        assert side["fsyncs"][f"torch_delta {profile}"] > 0
        assert side["fsyncs"]["publish"] > 0
    assert "SkyRL side skipped: left out by --no-skyrl" in run.stderr


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="needs SkyRL (benchmarks/skyrl_env.sh)")
def test_publish_follow_beside_skyrl(tmp_path: Path) -> None:
    result, run = run_script(tmp_path, "publish_follow.py", "--small", "--repeats", "3")
    check_publish_follow(result, [{"SkyRL"}, *OURS])
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


@pytest.mark.slow
def test_trainer_overhead_where_a_bf16_pass_would_take_minutes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    only = ("trainer_overhead.py", "--small", "--repeats", "1", "--no-memory")
    result, run = run_script(tmp_path, *only, "--optimizer-only")
    for dtype in ("fp32", "bf16"):
        for times in result[dtype]["times_s"].values():
            assert (times["full"], len(times["optimizer_only"])) == ([], 3)
    assert "| bare | - | - | - |" in run.stdout
    result, _ = run_script(tmp_path, *only, "--no-autocast", "--dtypes", "fp32")
    assert all(len(times["full"]) == 1 for times in result["fp32"]["times_s"].values())


def test_catch_up_takes_one_step_or_one_per_version(tmp_path: Path) -> None:
    result, run = run_script(tmp_path, "catch_up.py", "--small", "--versions", "6", "--repeats", "2")
    ways = result["ways"]
    assert {way: counts["steps"] for way, counts in ways.items()} == {
        "merged": 1,
        "one by one": 6,
        "one by one, no fsync": 6,
    }
    assert ways["merged"]["stored_bytes"] == ways["one by one"]["stored_bytes"]
    assert 0 < ways["merged"]["set_elements"] <= ways["one by one"]["set_elements"]
    assert all(min(counts["seconds"]) > 0 for counts in ways.values())
    assert "| merged |" in run.stdout


@pytest.mark.slow
def test_scale_model_predicts_and_checks_itself(tmp_path: Path) -> None:
    options = ["--small", "--repeats", "2", "--validate", "--senders", "2", "--layers", "1", "--mesh", "16384"]
    worlds = ["--models", "qwen3-0.6b", "llama-405b", "--world-sizes", "64", "128"]
    result, run = run_script(tmp_path, "scale_model.py", *options, *worlds)
    sizes = {row["model"]: row["elements"] for row in result["predictions"]}
    assert sizes == {"qwen3-0.6b": 596_049_920, "llama-405b": 405_853_388_800}  # as their model cards say
    near, far = (row for row in result["predictions"] if row["model"] == "llama-405b")
    # Halving the shard takes its share off every phase but the commit, which grows with the ranks.
    for phase in ("capture_s", "encode_s"):
        assert 0.49 < far["ours"][phase] / near["ours"][phase] < 1.0
    assert far["ours"]["commit_s"] > near["ours"]["commit_s"]
    assert far["gather_on_rank_0"] == near["gather_on_rank_0"]
    assert set(result["validation"]["ratios"]) == {"capture", "encode", "decode", "commit"}
    assert result["validation"]["changed"] > 0
    assert "senders of 16384" in run.stdout


@pytest.mark.parametrize("script", ["gpu_capture.py", "gpu_encode.py"])
def test_gpu_benchmarks_run_or_say_that_nothing_was_measured(tmp_path: Path, script: str) -> None:
    import torch

    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / script), "--small", "--repeats", "2", "--json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if torch.cuda.is_available():
        assert run.returncode == 0, run.stderr
        assert json.loads(result.read_text(encoding="utf-8"))
    else:
        assert run.returncode == 1
        assert "no CUDA device here; nothing was measured" in run.stderr
        assert not result.exists()


def test_bytes_measures_every_encoding_against_the_bound(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "bytes.py"), "--traces", str(tmp_path), "--json", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    rows = {row["encoding"]: row for row in json.loads(result.read_text(encoding="utf-8"))}
    assert set(rows) == {"packed small", "packed fast", "xor", "coo"}
    assert rows["coo"]["payload"] == 48
    assert rows["packed small"]["total"] < rows["coo"]["total"]
    assert min(row["bound"] for row in rows.values()) > 0
    assert "| synthetic |" in run.stdout


@pytest.mark.vllm
@pytest.mark.slow
def test_trl_sync_measures_both_modes_each_way(tmp_path: Path) -> None:
    for needed in ("trl", "vllm"):
        pytest.importorskip(needed)
    result, run = run_script(tmp_path, "trl_sync.py", "--small", "--rounds", "1", "--syncs", "2")
    ours, dense = result["server"]["deltas"], result["server"]["everything"]
    assert len(ours) == len(dense) == 2
    for row in dense:
        assert row["changed"] == 1.0  # whole tensors, whatever changed
        assert row["stored_bytes"] > 0.9 * result["model_bytes"]
    for row in ours + result["colocated"]["deltas"]:
        assert 0 < row["changed"] < 0.5
        assert 0 < row["stored_bytes"] < 0.5 * result["model_bytes"]
    for row in [*ours, *dense, *result["colocated"]["deltas"], *result["colocated"]["TRL's own"]]:
        assert 0 < row["pause_s"] <= row["sync_s"]
    assert len(result["colocated"]["deltas"]) == len(result["colocated"]["TRL's own"]) == 2
    assert run.stdout.count("| ours / theirs |") == 2
