"""Every test runs in one of the lanes of `make test`: what is marked `vllm` in the one that has vLLM."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LANE = (TESTS / "vllm", TESTS / "trl", TESTS / "benchmarks")


def test_only_the_lane_of_vllm_holds_tests_marked_so() -> None:
    itself = Path(__file__).resolve()
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.vllm" in path.read_text() and path != itself]
    assert [path for path in marked if not set(LANE) & set(path.parents)] == []
    assert marked, "the lane would be empty"


def test_the_lanes_divide_the_tests_between_them() -> None:
    recipes = (TESTS.parent / "Makefile").read_text()
    assert '-m "not vllm and not skyrl"' in recipes
    lane = re.search(r"^VLLM_TESTS := TORCH_DELTA_LANE=vllm \S+ -m pytest -m vllm (.*)$", recipes, re.MULTILINE)
    assert lane is not None
    assert lane[1] == "tests/vllm $(wildcard tests/trl) tests/benchmarks"
    lane = re.search(r"^SKYRL_TESTS := TORCH_DELTA_LANE=skyrl \S+ -m pytest -m skyrl (.*)$", recipes, re.MULTILINE)
    assert lane is not None
    assert lane[1] == "tests/skyrl"


def test_only_the_lane_of_skyrl_holds_tests_marked_so() -> None:
    itself = Path(__file__).resolve()
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.skyrl" in path.read_text() and path != itself]
    assert [path for path in marked if TESTS / "skyrl" not in path.parents] == []
    assert marked, "the lane would be empty"
