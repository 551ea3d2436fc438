"""What a server's API process asks all of its workers, and what their answers mean."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from torch_delta.errors import ServerRefused
from torch_delta.vllm.endpoints_requests import Problem
from torch_delta.vllm.endpoints_steps import explained, left_s, status_of, worker_problem
from torch_delta.vllm.fleet.answers import failure_of, prepare_failure_of, prepared_of, workers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.vllm.endpoints_calls import Calls
    from torch_delta.vllm.fleet.reports import WorkerStatus

CALL_TIMEOUT_S = 30.0
"""For quick calls outside the pause."""
_POLL_S = 0.1
_MARGIN_S = 5.0
"""How much longer than the workers' own deadline a wait for them lasts, so that they can say why they were late."""


class Workers:
    """All workers of one server. Used on the event loop of its API process only.

    Args:
        calls: into the engine.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def prepared(self, version: int | None, number: int, timeout_s: float | None) -> int:
        """The version that can be applied once request `number` was dealt with: only then it is of the right stream.

        Raises:
            Problem: the preparation failed, or is not done `timeout_s` (None: without end) and a margin from now.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s + _MARGIN_S
        while True:
            workers = self.parsed(await self.raw())
            now = prepared_of(workers)
            is_done = all(worker.answered >= number for worker in workers)
            if now is not None and is_done and (version is None or now >= version):
                return now
            failed = prepare_failure_of(workers, number)
            if failed is not None:
                raise worker_problem(500, "prepare", failed, "")
            if ends_s is not None and left_s(ends_s) <= 0:
                raise Problem(
                    504,
                    f"version {version if version is not None else 'newest'} was not prepared within {timeout_s:g} s "
                    f"(workers: {[w.preparing for w in workers]}); it goes on, ask again or look at the status",
                    phase="prepare",
                    kind="DeadlineExceeded",
                )
            await asyncio.sleep(_POLL_S)

    async def ask(self, method: str, argument: Mapping[str, object] | None) -> list[object]:
        """Replies of all workers, which all accepted.

        Raises:
            Problem: one did not, or no answer came in time.
        """
        phase = method.removeprefix("torch_delta_")
        async with explained(phase, CALL_TIMEOUT_S):
            replies = await self._calls.workers(method, argument)
        for rank, reply in enumerate(replies):
            if not isinstance(reply, dict) or reply.get("accepted") is not True:
                error = reply.get("error") if isinstance(reply, dict) else None
                found = (rank, error) if isinstance(error, dict) else None
                raise worker_problem(400, phase, found, f"worker {rank} answered {reply!r}")
        return replies

    async def raw(self) -> list[object]:
        """The status of every worker, as it came.

        Raises:
            Problem: no answer in time.
        """
        async with explained("status", CALL_TIMEOUT_S):
            return await self._calls.workers("torch_delta_status")

    def parsed(self, answers: object) -> tuple[WorkerStatus, ...]:
        """What such statuses say.

        Raises:
            Problem: it makes no sense.
        """
        try:
            return workers_of(answers, "of this process")
        except ServerRefused as error:
            raise Problem(500, error.message, phase="status") from error

    async def classed(self, problem: Problem) -> Problem:
        """The problem with its error's class and status, which vLLM does not pass on and the workers' status has."""
        try:
            failed = failure_of(self.parsed(await self.raw()))
        except Problem:
            failed = None
        if failed is None or str(failed[1].get("message")) not in problem.message:
            return problem
        kind = str(failed[1].get("type"))
        return Problem(status_of(kind, problem.status), problem.message, phase=problem.phase, kind=kind)
