"""The lanes of `make test`: tests that need vLLM or SkyRL carry the marker of that name and run where it is installed.

Elsewhere they are skipped, which the summary shows. In the lane that exists for them (`make test-vllm` sets
TORCH_DELTA_LANE=vllm, `make test-skyrl` =skyrl) none is skipped, and a run in which none of them passed fails.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

LANE = os.environ.get("TORCH_DELTA_LANE")
IS_VLLM_LANE = LANE == "vllm"
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_VLLM or IS_VLLM_LANE:
        return
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; `make test-vllm` has it"))


def pytest_collection(session: pytest.Session) -> None:
    if LANE is not None:
        session.config.pluginmanager.register(_Passed(LANE), f"passed-{LANE}-tests")


class _Passed:
    """Counts what passed, for the lane's verdict."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.num_passed = 0
        self._marked: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._marked = {item.nodeid for item in items if item.get_closest_marker(self.lane) is not None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and report.nodeid in self._marked:
            self.num_passed += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.num_passed == 0 and session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.num_passed == 0:
            terminalreporter.write_line(f"no test marked `{self.lane}` passed: this lane fails", red=True)
