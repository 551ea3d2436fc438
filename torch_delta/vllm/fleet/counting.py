"""Counters of a fleet."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from torch_delta.vllm.fleet.reports import FleetMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.vllm.fleet.reports import ServerReport
    from torch_delta.vllm.fleet.server import Server


class Counting:
    """Thread-safe; the methods say what happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._pause_s = 0.0
        self._longest_pause_s = 0.0

    def asked(self) -> None:
        """A version was asked for."""
        self._count("asked")

    def excluded(self) -> None:
        """A server was left out."""
        self._count("excluded")

    def joined(self) -> None:
        """A server came back or joined."""
        self._count("joined")

    def failed(self, phase: str) -> None:
        """A server failed."""
        with self._lock:
            self._failures[phase] += 1

    def applied(self, report: ServerReport) -> None:
        """A server reached a version."""
        if report.applied:
            with self._lock:
                self._events["applied"] += 1
                self._pause_s += report.pause_s
                self._longest_pause_s = max(self._longest_pause_s, report.pause_s)

    def metrics(self, servers: Sequence[Server]) -> FleetMetrics:
        """All counters now."""
        with self._lock:
            return FleetMetrics(
                num_servers=len(servers),
                num_excluded=sum(server.role == "excluded" for server in servers),
                num_updates=self._events["asked"],
                num_applied=self._events["applied"],
                num_failures=dict(self._failures),
                num_exclusions=self._events["excluded"],
                num_rejoins=self._events["joined"],
                num_restarts=sum(server.num_restarts for server in servers),
                pause_s=self._pause_s,
                longest_pause_s=self._longest_pause_s,
            )

    def _count(self, event: str) -> None:
        with self._lock:
            self._events[event] += 1
