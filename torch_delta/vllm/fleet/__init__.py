"""Controls vLLM servers that follow a stream, over HTTP; imports no vllm."""

from __future__ import annotations

from torch_delta.vllm.fleet.config import FleetConfig
from torch_delta.vllm.fleet.fleet import Fleet
from torch_delta.vllm.fleet.reports import (
    FleetMetrics,
    FleetReport,
    FleetStatus,
    PrepareReport,
    ServerReport,
    ServerStatus,
    WorkerStatus,
)

__all__ = [
    "Fleet",
    "FleetConfig",
    "FleetMetrics",
    "FleetReport",
    "FleetStatus",
    "PrepareReport",
    "ServerReport",
    "ServerStatus",
    "WorkerStatus",
]
