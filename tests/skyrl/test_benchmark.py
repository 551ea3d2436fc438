"""benchmarks/skyrl_side_by_side.py and skyrl_load.py run, and find what both sides hold equal to what was sent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "skyrl_side_by_side.py"


def test_both_sides_are_measured_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--layers", "2", "--width", "128", "--repeats", "2"]
    command += ["--work", str(tmp_path), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["sides"].keys() == {"SkyRL", "torch_delta"}
    for rounds in found["sides"].values():
        assert len(rounds) == 2
        for one in rounds:
            assert one["publish_s"] > 0
            assert one["fetch_s"] > 0
            assert len(one["rank_bytes"]) == 2
            # Less than all elements that changed would take, at two bytes each and as much for each position, and no
            # less than one bit for each.
            changed = found["weights"]["density"] * found["weights"]["num_elements"]
            assert changed / 8 < one["wire_bytes"] < 8 * changed
    assert "| ratio |" in done.stdout


def test_the_pause_of_both_sides_is_measured_in_real_vllm(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT.with_name("skyrl_load.py")), "--layers", "2"]
    command += ["--width", "256", "--repeats", "2", "--work", str(tmp_path), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "engines: skyrl.backends.skyrl_train.weight_sync.delta.engine, torch_delta_skyrl.receiver" in done.stdout
    rounds = json.loads(out.read_text())["rounds"]
    assert [len(rounds[name]) for name in ("SkyRL", "torch_delta")] == [2, 2]
    assert min(one["load_s"] for told in rounds.values() for one in told) > 0
