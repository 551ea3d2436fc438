"""Controls a server by vLLM's own routes (VLLM_SERVER_DEV_MODE=1), the pause driven from this process.

`/collective_rpc` never gets a timeout: after one, vLLM hands the late reply to the next call. `/pause` always gets its
mode: the default aborts every request in flight (F111). A server that is paused already, by a client that died for
example, is resumed after the update like any other: these routes do not tell whose pause it is.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch_delta.errors import ServerRefused, ServerUnavailable, TorchDeltaError
from torch_delta.store.waiting import Backoff, retry
from torch_delta.vllm.fleet.answers import failure_of, generation_of, version_of, workers_of
from torch_delta.vllm.fleet.http import Deadline
from torch_delta.vllm.fleet.wire import Answered, Applied, Goal, Wire, accepted, worker_refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch_delta.vllm.fleet.http import Http

logger = logging.getLogger("torch_delta")


class DevWire(Wire):
    """See the module. Remembers what an interrupted apply left to do."""

    def __init__(self, http: Http) -> None:
        super().__init__(http)
        self._session = False  # an update session may be open
        self._paused = False  # the server may be paused, by us
        self._owes_reset = False  # new weights are in, old values may be cached

    def init(self, init_info: Mapping[str, object], deadline: Deadline) -> None:
        """See `Wire.init`."""
        body = {"init_info": dict(init_info)}
        self.http.call("POST", "/init_weight_transfer_engine", phase="init", deadline=deadline, body=body)

    def status(self, deadline: Deadline) -> Answered:
        """See `Wire.status`."""
        workers = workers_of(self._rpc("torch_delta_status", None, "status", deadline), self.http.url)
        return Answered(
            workers=workers,
            generation=generation_of(workers),
            owes_reset=self._owes_reset,
            paused=self._paused,
        )

    def prepare(self, goal: Goal, timeout_s: float, deadline: Deadline) -> int:
        """See `Wire.prepare`."""
        request = {**goal.as_fields(), "timeout_s": timeout_s}
        answers = self._rpc("torch_delta_prepare", request, "prepare", deadline)
        return accepted(answers, self.http.url, "prepare")

    def verify(self, deadline: Deadline) -> None:
        """See `Wire.verify`."""
        accepted(self._rpc("torch_delta_verify", None, "verify", deadline), self.http.url, "verify")

    def apply(self, goal: Goal, mode: str, *, timeout_s: float, resume_timeout_s: float) -> Applied:
        """See `Wire.apply`."""
        deadline = Deadline(timeout_s)
        phases_s: dict[str, float] = {}
        began_s = time.monotonic()
        self._paused = True  # before asking: the answer may be lost
        try:
            with _timed(phases_s, "pause"):
                query = {"mode": "keep", "clear_cache": "true"}
                self.http.call("POST", "/pause", phase="pause", deadline=deadline, query=query)
            now = self._update(goal, mode, deadline, phases_s)
            with _timed(phases_s, "reset"):
                self._reset(deadline)
        finally:
            with _timed(phases_s, "resume"):
                self.release(resume_timeout_s=resume_timeout_s)
        return Applied(version=now, pause_s=time.monotonic() - began_s, phases_s=phases_s)

    def release(self, *, resume_timeout_s: float) -> None:
        """See `Wire.release`."""
        deadline = Deadline(resume_timeout_s)
        if self._session:
            try:
                self._close_session(deadline)
            except TorchDeltaError as error:
                # Resuming matters more; the session is tried again before the next version.
                logger.warning("server %s: an interrupted update could not be closed: %s", self.http.url, error)
        if self._paused:
            retry(
                lambda: self.http.call("POST", "/resume", phase="resume", deadline=Deadline(resume_timeout_s)),
                phase="resume (the server may still be paused)",
                peer=self.http.url,
                timeout_s=deadline.left_s(),
                backoff=Backoff(first_s=0.05, most_s=1.0),
                transient=(ServerUnavailable, ServerRefused),
            )
            self._paused = False

    def _update(self, goal: Goal, mode: str, deadline: Deadline, phases_s: dict[str, float]) -> int:
        """Start, update, check, finish; returns the version all workers run and verified."""
        with _timed(phases_s, "start"):
            self._session = True
            self.http.call("POST", "/start_weight_update", phase="start", deadline=deadline)
        with _timed(phases_s, "update"):
            self._owes_reset = True
            info = {**goal.as_fields(), "mode": mode}
            self.http.call("POST", "/update_weights", phase="update", deadline=deadline, body={"update_info": info})
        with _timed(phases_s, "check"):
            workers = workers_of(self._rpc("torch_delta_status", None, "check", deadline), self.http.url)
            now = version_of(workers)
            if now is None or now < goal.version:
                rank, error = failure_of(workers) or (0, {"message": f"workers run {[w.version for w in workers]}"})
                raise worker_refused(self.http.url, "update", rank, error)
        with _timed(phases_s, "finish"):
            label = {"weight_version": str(now)}
            self.http.call("POST", "/finish_weight_update", phase="finish", deadline=deadline, body=label)
            self._session = False
        return now

    def _close_session(self, deadline: Deadline) -> None:
        """Finish, without a version, if a session is open still; an engine closes those that it failed itself."""
        workers = workers_of(self._rpc("torch_delta_status", None, "release", deadline), self.http.url)
        if any(worker.session for worker in workers):
            self.http.call("POST", "/finish_weight_update", phase="release", deadline=deadline, body={})
        self._session = False

    def _reset(self, deadline: Deadline) -> None:
        """Drop cached values of older weights; of running requests too, which the engine computes again (F109)."""
        query = {"reset_running_requests": "true", "reset_external": "true"}
        answer = self.http.call("POST", "/reset_prefix_cache", phase="reset", deadline=deadline, query=query)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise ServerRefused(
                f"reset: server {self.http.url} runs the new weights and did not reset its prefix cache (answer "
                f"{answer!r}): requests with a cached prefix would mix old and new weights; update it again",
                url=self.http.url,
                phase="reset",
                status=None,
            )
        self._owes_reset = False

    def _rpc(self, method: str, argument: Mapping[str, object] | None, phase: str, deadline: Deadline) -> object:
        body: dict[str, object] = {"method": method}
        if argument is not None:
            body["args"] = [dict(argument)]
        answer = self.http.call("POST", "/collective_rpc", phase=phase, deadline=deadline, body=body)
        return answer.get("results") if isinstance(answer, dict) else answer


@contextmanager
def _timed(phases_s: dict[str, float], name: str) -> Iterator[None]:
    began_s = time.monotonic()
    try:
        yield
    finally:
        phases_s[name] = time.monotonic() - began_s
