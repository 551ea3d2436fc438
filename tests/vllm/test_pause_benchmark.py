"""benchmarks/pause.py still runs and measures what it says, at a size that proves nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "pause.py"

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Raw samples, and what was shown; both parts in one run, since most of it is starting vLLM."""
    folder = tmp_path_factory.mktemp("pause")
    result = folder / "result.json"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--small", "--repeats", "2", "--fractions", "0.01", "0.05"]
    done = subprocess.run(
        [*command, "--work", str(folder), "--json", str(result)],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(result.read_text(encoding="utf-8")), done.stdout


def test_all_three_ways_are_timed_on_one_model(found: tuple[dict[str, Any], str]) -> None:
    result, shown = found
    assert [row["fraction"] for row in result["comparison"]] == [0.01, 0.05]
    for row in result["comparison"]:
        assert row["changed"] == pytest.approx(row["fraction"] * result["num_parameters"], rel=0.2)
        assert set(row["pause_s"]) == {"torch_delta", "vLLM patch loader", "layerwise reload"}
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["pause_s"].values())
    assert "| 5.0% |" in shown


def test_what_memory_allows_is_timed_beside_it(found: tuple[dict[str, Any], str]) -> None:
    result, shown = found
    for row in result["comparison"]:
        assert row["lines_share"] == pytest.approx(1 - (1 - row["fraction"]) ** 32, rel=0.1)
        assert len(row["touch_s"]) == len(row["copy_s"]) == 2
        assert min(row["touch_s"] + row["copy_s"]) > 0
    assert "| least possible: touched once / the reload |" in shown


def test_our_pause_is_timed_over_sizes(found: tuple[dict[str, Any], str]) -> None:
    result, shown = found
    small, large = result["sizes"]
    assert large["num_parameters"] > 2 * small["num_parameters"]
    assert large["changed"] == pytest.approx(small["changed"], rel=0.2)
    assert min(small["pause_s"] + large["pause_s"]) > 0
    assert "| pause ms |" in shown


def test_cache_lines_are_counted_as_they_are_touched(tmp_path: Path) -> None:
    """Changes scattered evenly, which the synthetic pair has, touch what chance says."""
    result = tmp_path / "lines.json"
    command = [sys.executable, str(BENCHMARKS / "cache_lines.py"), "--traces", str(tmp_path / "none")]
    done = subprocess.run([*command, "--json", str(result)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(result.read_text(encoding="utf-8"))
    assert row["even"] == pytest.approx(1 - (1 - row["density"]) ** 32)
    assert row["touched"] == pytest.approx(row["even"], rel=0.05)
    assert row["touched"] < 32 * row["density"]
    assert f"| {row['touched']:.1%} |" in done.stdout
