"""The engine core's side of a weight update: asks all ranks how it went, and raises where it harms nobody.

The general plugin puts this around `EngineCore.collective_rpc`, for engines with our backend. Ranks never raise (see
`replica`); the caller of ``/update_weights`` or `LLM.update_weights` still gets the reason, the session is closed on
every rank alike, and no version is announced that was not applied. The core is also where the prefix cache lives: what
was computed with older weights is dropped before anybody hears that the update is finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch_delta.errors import ApplyFailed, RequestRefused
from torch_delta.vllm.records import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INIT = "init_weight_transfer_engine"
START = "start_weight_update"
START_DRAFT = "start_draft_weight_update"
UPDATE = "update_weights"
FINISH = "finish_weight_update"
WATCHED = frozenset({INIT, START, START_DRAFT, UPDATE, FINISH})
"""The remote calls that are looked after; all others pass untouched."""


class Call(Protocol):
    """`collective_rpc` of an engine core: the reply of every rank."""

    def __call__(self, method: str, *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Call a worker method on every rank."""


class Core(Protocol):
    """What is needed of the engine core."""

    def reset_caches(self) -> bool:
        """Forget everything computed with older weights, running requests included; False if that did not succeed."""

    def announce(self, version: int) -> None:
        """Report this version of the weights from now on."""


def supervise(call: Call, core: Core, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Make one of the watched calls.

    Args:
        call: the engine core's own `collective_rpc`.
        core: the engine core.
        method: one of `WATCHED`.
        args: of the call.
        kwargs: of the call.

    Returns:
        What the workers gave.

    Raises:
        TorchDeltaError: the request was refused or failed on some rank; all of them are in the same state.
    """
    before = call("torch_delta_outcome")
    session = any(outcome["session"] for outcome in before)
    _check_order(method, args, kwargs, session=session)
    replies = call(method, args=args, kwargs=kwargs)
    outcomes = call("torch_delta_outcome")
    failures = [Failure.from_json(outcome["error"]) for outcome in outcomes if not outcome["ok"]]
    if method == UPDATE and failures:
        call(FINISH)  # closes the session everywhere; says again that it failed, which is known
    if failures:
        raise failures[0].error()
    if method == FINISH:
        _finished(call, core, outcomes)
    return replies


def _check_order(method: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, session: bool) -> None:
    """Refuse what workers would refuse one by one."""
    if method == START_DRAFT:
        raise RequestRefused(
            "torch_delta does not update draft models of speculative decoding; serve without one, or restart the "
            "server to change it"
        )
    if method == START and session:
        raise RequestRefused("a weight update is in progress; finish_weight_update ends it")
    if method in {UPDATE, FINISH} and not session:
        raise RequestRefused(f"{method} without start_weight_update before it")
    if method == UPDATE and not isinstance(kwargs.get("update_info", args[0] if args else None), dict):
        raise RequestRefused("update_info: expected one object for all ranks, with version and mode")


def _finished(call: Call, core: Core, outcomes: Sequence[Mapping[str, Any]]) -> None:
    try:
        # A framework that resets the cache itself, or was told not to, says so with every outcome.
        dropped = all(outcome.get("keeps_cache") for outcome in outcomes) or core.reset_caches()
        reason = "the reset was refused"
    except Exception as error:
        dropped, reason = False, str(error)
    if not dropped:
        text = f"the weights are updated, but results cached with older ones could not be dropped: {reason}"
        call("torch_delta_stale_cache", args=(text,))
        raise ApplyFailed(f"{text}; pause with clear_cache, then finish again", undone=False)
    versions = {outcome["version"] for outcome in outcomes}
    if len(versions) == 1 and None not in versions:
        core.announce(versions.pop())
