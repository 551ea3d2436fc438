"""Takes a server through its versions from its own API process: prepare while it generates, then one short pause.

Whoever asked may die: an update runs to its end once it has begun, and that end is always an attempt to resume.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

from torch_delta.vllm.endpoints_requests import Problem
from torch_delta.vllm.endpoints_steps import Wanted, explained, left_s, worker_problem
from torch_delta.vllm.endpoints_workers import CALL_TIMEOUT_S, Workers
from torch_delta.vllm.fleet.answers import failure_of, prepared_of, stream_id_of, version_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.vllm.endpoints_calls import Calls
    from torch_delta.vllm.fleet.reports import WorkerStatus

logger = logging.getLogger("torch_delta")

_RETRY_S = 0.2


class Controller:
    """The state of one server's API process. Used on its event loop only.

    Args:
        calls: into the engine.
        why_not: why updates are refused on this server; None if they are not.
    """

    def __init__(self, calls: Calls, why_not: str | None = None) -> None:
        self._calls = calls
        self._workers = Workers(calls)
        self._why_not = why_not
        self._generation = secrets.token_hex(8)
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._paused = False  # by us, and not resumed yet
        self._owes_reset = False

    @property
    def updating(self) -> bool:
        """Whether an update runs now."""
        return self._one.locked()

    async def init(self, init_info: Mapping[str, object]) -> None:
        """Tell all workers their stream.

        Raises:
            Problem: refused, with the engine's reason.
        """
        self._supported("init")
        try:
            async with explained("init", CALL_TIMEOUT_S):
                await self._calls.init(init_info)
        except Problem as problem:
            raise await self._workers.classed(problem) from problem

    async def status(self) -> dict[str, object]:
        """What all workers say, and this process."""
        answers = await self._workers.raw()
        workers = self._workers.parsed(answers)
        async with explained("status", CALL_TIMEOUT_S):
            paused = await self._calls.is_paused()
        return {
            "generation": self._generation,
            "stream_id": stream_id_of(workers),
            "version": version_of(workers),
            "prepared": prepared_of(workers),
            "ready": all(worker.ready for worker in workers) and not self._owes_reset and not paused,
            "paused": paused,
            "owes_reset": self._owes_reset,
            "updating": self.updating,
            "updates_refused": self._why_not,
            "workers": answers,
        }

    async def prepare(
        self, version: int | None, *, timeout_s: float | None, wait: bool, stream_id: str | None = None
    ) -> dict[str, object]:
        """Have all workers fetch and verify a version.

        Args:
            version: None for the newest one.
            stream_id: of its stream; None for the newest of those that continue each other.
            timeout_s: for the workers, and for the wait; None leaves it to the engine's configuration.
            wait: return when they have it.

        Returns:
            The workers' replies and, after a wait, the version that can be applied.

        Raises:
            Problem: not accepted, failed or too late.
        """
        self._supported("prepare")
        request: dict[str, object] = {"version": version}
        if timeout_s is not None:
            request["timeout_s"] = timeout_s
        if stream_id is not None:
            request["stream_id"] = stream_id
        replies = await self._workers.ask("torch_delta_prepare", request)
        if not wait:
            return {"workers": replies}
        number = max((int(reply.get("request", 0)) for reply in replies if isinstance(reply, dict)), default=0)
        return {"workers": replies, "prepared": await self._workers.prepared(version, number, timeout_s)}

    async def verify(self) -> dict[str, object]:
        """Start a digest of all live weights on every worker."""
        return {"workers": await self._workers.ask("torch_delta_verify", None)}

    async def update(
        self,
        version: int,
        *,
        mode: str = "auto",
        timeout_s: float = 120.0,
        resume_timeout_s: float = 60.0,
        stream_id: str | None = None,
    ) -> dict[str, object]:
        """Apply a prepared version in a pause that keeps requests, and resume, whatever happens to the caller.

        Args:
            version: to apply.
            mode: ``"auto"`` or ``"reload"``.
            timeout_s: for the pause, and before that for another update to end.
            resume_timeout_s: for ending it, on top.
            stream_id: of the stream that the version is of; refused if the engine follows another.

        Returns:
            version, pause_s and phases_s.

        Raises:
            Problem: names the part of the pause; the old weights are served unless it says otherwise.
        """
        self._supported("update")
        wanted = Wanted(version, stream_id, mode)
        task = asyncio.create_task(self._update(wanted, timeout_s, resume_timeout_s))
        self._tasks.add(task)  # the event loop itself keeps no strong reference
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _update(self, wanted: Wanted, timeout_s: float, resume_timeout_s: float) -> dict[str, object]:
        async with explained("queue", timeout_s):
            await self._one.acquire()
        try:
            return await self._alone(wanted, timeout_s, resume_timeout_s)
        finally:
            self._one.release()

    async def _alone(self, wanted: Wanted, timeout_s: float, resume_timeout_s: float) -> dict[str, object]:
        workers = self._workers.parsed(await self._workers.raw())
        if self._is_there(workers, wanted):
            return {"version": version_of(workers), "pause_s": 0.0, "phases_s": {}}
        phases_s: dict[str, float] = {}
        ends_s = time.monotonic() + timeout_s
        began_s = time.monotonic()
        try:
            await self._pause(phases_s, ends_s)
            now = await self._apply(wanted, phases_s, ends_s)
        finally:
            await self._resume(phases_s, resume_timeout_s)
        pause_s = time.monotonic() - began_s
        logger.info("version %d applied; paused for %.3f s", now, pause_s)
        return {"version": now, "pause_s": pause_s, "phases_s": phases_s}

    def _is_there(self, workers: Sequence[WorkerStatus], wanted: Wanted) -> bool:
        """Refuse before any pause what cannot succeed; True if there is nothing to do."""
        version, follows = wanted.version, stream_id_of(workers)
        if not all(worker.initialised for worker in workers):
            raise Problem(409, "not initialised: POST /torch_delta/init with the stream first", phase="update")
        if wanted.stream_id not in {None, follows}:
            raise Problem(
                409,
                f"version {version} of stream {wanted.stream_id} is asked for, and this server follows stream "
                f"{follows}: POST /torch_delta/prepare with that stream_id and wait for it before updating",
                phase="update",
            )
        now, prepared = version_of(workers), prepared_of(workers)
        if now is not None and version < now:
            raise Problem(
                409,
                f"version {version} is older than version {now}, which this server runs; a stream is followed forwards "
                "only. Publish the old weights as a new version to go back",
                phase="update",
            )
        if now == version and not self._owes_reset and wanted.mode == "auto":
            return True
        if wanted.mode == "auto" and now is not None and (prepared is None or prepared < version):
            raise Problem(
                409,
                f"version {version} is not prepared (prepared: {prepared}): POST /torch_delta/prepare and wait for it "
                "before updating, so that nothing is fetched in the pause",
                phase="update",
            )
        return False

    async def _pause(self, phases_s: dict[str, float], ends_s: float) -> None:
        async with explained("pause", left_s(ends_s), phases_s):
            if await self._calls.is_paused() and not self._paused:
                return  # somebody else's pause, which somebody else ends
            self._paused = True  # before asking: the answer may be late
            await self._calls.pause()

    async def _apply(self, wanted: Wanted, phases_s: dict[str, float], ends_s: float) -> int:
        """Start, update, check, finish, reset; returns the version that all workers verified."""
        try:
            async with explained("start", left_s(ends_s), phases_s):
                await self._calls.start()
            async with explained("update", left_s(ends_s), phases_s):
                self._owes_reset = True
                await self._calls.update(wanted.as_info())
            async with explained("check", left_s(ends_s), phases_s):
                workers = self._workers.parsed(await self._calls.workers("torch_delta_status"))
            now = version_of(workers)
            if now is None or now < wanted.version:
                raise worker_problem(500, "update", failure_of(workers), f"workers run {[w.version for w in workers]}")
            async with explained("finish", left_s(ends_s), phases_s):
                await self._calls.finish(str(now))
        except Problem as problem:
            await self._close_session()
            raise await self._workers.classed(problem) from problem
        async with explained("reset", left_s(ends_s), phases_s):
            was_reset = await self._calls.reset_caches()
        if not was_reset:
            raise Problem(
                500,
                f"version {now} runs, and the prefix cache was not reset: requests with a cached prefix would mix old "
                "and new weights; update again to try once more",
                phase="reset",
                kind="StaleCache",
            )
        self._owes_reset = False
        return now

    async def _close_session(self) -> None:
        """After a failure: the engine closes a session that failed; one that was left open would block the next."""
        try:
            async with explained("release", CALL_TIMEOUT_S):
                workers = self._workers.parsed(await self._calls.workers("torch_delta_status"))
                if any(worker.session for worker in workers):
                    await self._calls.finish(None)
        except Problem as problem:
            logger.warning("an interrupted update could not be closed: %s", problem.message)

    async def _resume(self, phases_s: dict[str, float], timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        while self._paused:
            try:
                async with explained("resume", left_s(ends_s), phases_s):
                    await self._calls.resume()
                    self._paused = False
            except Problem as problem:
                if left_s(ends_s) <= _RETRY_S:
                    raise Problem(
                        504,
                        f"the server may still be paused: resuming failed for {timeout_s:g} s: {problem.message}; the "
                        "next update tries again",
                        phase="resume",
                        kind="DeadlineExceeded",
                    ) from problem
                await asyncio.sleep(_RETRY_S)

    def _supported(self, phase: str) -> None:
        if self._why_not is not None:
            raise Problem(501, f"this server does not follow streams: {self._why_not}", phase=phase)
