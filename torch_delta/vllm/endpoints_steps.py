"""One step of an update in the API process: a deadline, a stopwatch, and errors that become answers."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch_delta.vllm.endpoints_requests import Problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_WRAPPED = re.compile(r"^Call to \w+ method failed: ")  # vLLM's words around an error of its engine core
_STATUS_OF = {"RequestRefused": 400, "ChainError": 409, "BaseMismatch": 409}


class Wanted(NamedTuple):
    """What an update is asked for."""

    version: int
    stream_id: str | None
    """Of the stream that the version is of; None for the one that the engine follows."""
    mode: str

    def as_info(self) -> dict[str, object]:
        """For the engine."""
        info: dict[str, object] = {"version": self.version, "mode": self.mode}
        return info if self.stream_id is None else {**info, "stream_id": self.stream_id}


@asynccontextmanager
async def explained(phase: str, timeout_s: float, phases_s: dict[str, float] | None = None) -> AsyncIterator[None]:
    """A step with a deadline, whose failures become answers; its seconds go to `phases_s`."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise Problem(
            504, f"{phase}: the engine did not answer within {timeout_s:g} s", phase=phase, kind="DeadlineExceeded"
        ) from error
    except Problem:
        raise
    except Exception as error:
        text = _WRAPPED.sub("", str(error))
        raise Problem(500, f"{phase}: {text}", phase=phase, kind=type(error).__name__) from error
    finally:
        if phases_s is not None:
            phases_s[phase] = time.monotonic() - began_s


def worker_problem(status: int, phase: str, failed: tuple[int, Mapping[str, object]] | None, otherwise: str) -> Problem:
    """The answer for a failure that a worker put into its reply or status.

    Args:
        status: of HTTP, where the error's class does not decide.
        phase: what was being done.
        failed: rank and error; None if no worker said anything.
        otherwise: what to say then.
    """
    if failed is None:
        return Problem(status, f"{phase}: {otherwise}", phase=phase)
    rank, error = failed
    kind = str(error.get("type", "RequestRefused"))
    message = f"{phase}: worker {rank}: {error.get('message', 'no explanation')}"
    return Problem(status_of(kind, status if kind == "RequestRefused" else 500), message, phase=phase, kind=kind)


def left_s(ends_s: float) -> float:
    """Seconds until a point of time.monotonic(), at least 0."""
    return max(0.0, ends_s - time.monotonic())


def status_of(kind: str, otherwise: int) -> int:
    """HTTP's status for a class of errors."""
    return _STATUS_OF.get(kind, otherwise)
