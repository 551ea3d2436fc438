"""The worker methods that `collective_rpc` can name: quick, from dict to dict, and they never raise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_delta.errors import RequestRefused
from torch_delta.vllm.records import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.vllm.replica import Replica


def replica_of(worker: Any) -> Replica | None:
    """The replica behind a vLLM worker; None if another backend, or none, is selected."""
    replica: Replica | None = getattr(getattr(worker, "weight_transfer_engine", None), "replica", None)
    return replica


def prepare(worker: Any, request: object = None) -> dict[str, Any]:
    """``torch_delta_prepare({"version": 7})``: start to prepare a version, the newest without one."""
    replica = replica_of(worker)
    return _not_ours("prepare") if replica is None else replica.prepare({} if request is None else request)


def verify(worker: Any) -> dict[str, Any]:
    """``torch_delta_verify()``: start to digest all live weights."""
    replica = replica_of(worker)
    return _not_ours("verify") if replica is None else replica.verify()


def status(worker: Any) -> dict[str, Any]:
    """``torch_delta_status()``: where this rank stands."""
    replica = replica_of(worker)
    if replica is None:
        return {"initialised": False, "attached": False, "ready": False, **_not_ours("prepare")}
    return replica.status()


def outcome(worker: Any) -> dict[str, Any]:
    """``torch_delta_outcome()``: how the last step of an update went."""
    replica = replica_of(worker)
    if replica is None:
        return {"rank": 0, "ok": False, "session": False, "version": None, "error": _not_ours("apply")["error"]}
    return replica.outcome()


def stale_cache(worker: Any, reason: str) -> None:
    """``torch_delta_stale_cache(reason)``: results of older weights may still be served."""
    replica = replica_of(worker)
    if replica is not None:
        replica.stale_cache(reason)


def weights_lost(worker: Any, reason: str) -> None:
    """The live weights of this worker are about to go."""
    replica = replica_of(worker)
    if replica is not None:
        replica.weights_lost(reason)


def sleeps(worker: Any) -> None:
    """The memory of this worker's weights is about to go for a while."""
    replica = replica_of(worker)
    if replica is not None:
        replica.sleeps()


def wakes(worker: Any) -> None:
    """The memory of this worker's weights is back."""
    replica = replica_of(worker)
    if replica is not None:
        replica.wakes()


def _not_ours(phase: Any) -> dict[str, Any]:
    error = RequestRefused(
        "this engine was not started with the torch_delta backend; start it with --weight-transfer-config "
        '\'{"backend": "torch_delta"}\''
    )
    return {"accepted": False, "error": Failure.of(phase, error).to_json()}


METHODS: dict[str, Callable[..., Any]] = {
    "torch_delta_prepare": prepare,
    "torch_delta_verify": verify,
    "torch_delta_status": status,
    "torch_delta_outcome": outcome,
    "torch_delta_stale_cache": stale_cache,
}
"""By the names under which workers get them."""
