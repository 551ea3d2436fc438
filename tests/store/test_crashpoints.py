"""Crash points: the registry is the truth, arming works, an unarmed point costs nothing and does nothing."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import torch_delta
from torch_delta import crashpoints

PACKAGE = Path(torch_delta.__file__).parent
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def clean():
    crashpoints.disarm()
    yield
    crashpoints.disarm()


def reached_names() -> list[str]:
    """Every literal given to reach(...) in the package."""
    names = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if function == "reach":
                    assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: name the point literally"
                    names.append(node.args[0].value)
    return names


def test_the_registry_is_exactly_what_the_package_reaches() -> None:
    names = reached_names()
    assert set(names) == crashpoints.POINTS


# Tests that kill at every point of a family, apart from those that they name to be killed elsewhere.
FAMILIES = {
    "gc.": "stream/test_retention.py",
    "publish.": "publish/test_killed.py",
    "receive.": "receive/test_crash.py",
}


@pytest.mark.parametrize("point", sorted(point for point in crashpoints.POINTS if not point.startswith("vllm.")))
def test_somebody_is_killed_at_every_point(point: str) -> None:
    sources = {
        path.relative_to(TESTS).as_posix(): path.read_text()
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__)
    }
    family = FAMILIES.get(point.partition(".")[0] + ".")
    if family is not None:
        head = sources[family].partition("\ndef test_")[0]
        assert "crashpoints.POINTS" in sources[family]
        if f'"{point}"' not in head:
            return  # one of the family, not named as an exception
        del sources[family]
    kills = [name for name, text in sources.items() if re.search(rf'"{re.escape(point)}[":]', text) and "kill" in text]
    assert kills, f"no test kills a process at {point}"


def test_an_unknown_point_is_an_error_armed_or_not() -> None:
    for call in (crashpoints.reach, crashpoints.arm, crashpoints.count):
        with pytest.raises(ValueError, match=r"no crash point 'store\.typo'"):
            call("store.typo")


def test_an_action_runs_at_the_nth_time_only() -> None:
    calls = []
    with crashpoints.armed("store.linked", lambda: calls.append(crashpoints.count("store.linked")), nth=3):
        for _ in range(5):
            crashpoints.reach("store.linked")
            crashpoints.reach("store.deleted")
        assert crashpoints.count("store.deleted") == 5
    assert calls == [3]
    crashpoints.reach("store.linked")
    assert crashpoints.count("store.linked") == 0  # nothing is counted once disarmed


def test_a_block_that_never_reaches_its_point_fails() -> None:
    with (
        pytest.raises(AssertionError, match="reached 1 times, armed for the 2th"),
        crashpoints.armed("store.linked", lambda: None, nth=2),
    ):
        crashpoints.reach("store.linked")


def test_what_an_action_raises_comes_out_of_reach() -> None:
    def stop() -> None:
        raise KeyboardInterrupt("here")

    with pytest.raises(KeyboardInterrupt, match="here"), crashpoints.armed("store.linked", stop):
        crashpoints.reach("store.linked")


@pytest.mark.parametrize(
    ("value", "returncode", "output"),
    [
        ("store.linked", -signal.SIGKILL, "1\n"),
        ("store.linked:2", -signal.SIGKILL, "1\n2\n"),
        ("store.linked:2:exit", crashpoints.EXIT_CODE, "1\n2\n"),
        ("store.deleted:1:kill", 0, "1\n2\n3\n"),
        (None, 0, "1\n2\n3\n"),
    ],
)
def test_the_environment_arms_a_child(value, returncode, output) -> None:
    code = "from torch_delta.crashpoints import reach\nfor n in (1, 2, 3): print(n, flush=True); reach('store.linked')"
    environment = {key: text for key, text in os.environ.items() if key != crashpoints.ENVIRONMENT}
    if value is not None:
        environment[crashpoints.ENVIRONMENT] = value
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (returncode, output), run.stderr


@pytest.mark.parametrize("value", ["store.typo", "store.linked:x", "store.linked:1:burn", "", "store.linked:0"])
def test_a_bad_environment_is_an_error_not_a_test_without_its_crash(value, monkeypatch) -> None:
    monkeypatch.setenv(crashpoints.ENVIRONMENT, value)
    monkeypatch.setattr(crashpoints, "_armed", None)
    with pytest.raises(ValueError, match=r"crash point|expected NAME|nth counts"):
        crashpoints.reach("store.linked")


def test_the_environment_is_read_once(monkeypatch) -> None:
    crashpoints.reach("store.linked")
    monkeypatch.setenv(crashpoints.ENVIRONMENT, "store.linked")
    crashpoints.reach("store.linked")  # still alive
