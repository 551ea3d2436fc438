"""The thread in which everything happens that must not stall generation; one per rank.

Rank 0 decides which job comes next and the others follow, so that all ranks meet at the same places however differently
their requests were timed. A job that fails on one rank fails on all.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch_delta.errors import RequestRefused, TorchDeltaError
from torch_delta.vllm.records import Failure, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch_delta.vllm.ranks import Crew
    from torch_delta.vllm.standing import Standing

logger = logging.getLogger("torch_delta")

_HEAR_EVERY_S = 0.02
_AGAIN_S = 5.0
_EXTRA_S = 30.0  # ranks may finish a stage this much later than its own deadline lets them
_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Job:
    """What the background thread is asked to do.

    Attributes:
        kind: of work; see `preparing`.
        target: version to prepare; None for the newest.
        timeout_s: deadline of a preparation; None for the engine's own.
        asked: number of the request to prepare, the same on all ranks; 0 for the engine's own.
        stream_id: of the stream that the target is of; None for the newest of those that continue each other.
    """

    kind: Literal["attach", "prepare", "verify"]
    target: int | None = None
    timeout_s: float | None = None
    asked: int = 0
    stream_id: str | None = None


class Together:
    """One job on all ranks: each stage is done by everybody, or by nobody.

    Args:
        crew: all ranks.
        name: of the job, used once in the life of the engine.
    """

    def __init__(self, crew: Crew, name: str) -> None:
        self.rank = crew.rank
        self._crew = crew
        self._name = name
        self._stage = 0

    def __call__(self, phase: Phase, timeout_s: float, work: Callable[[], Any]) -> list[Any]:
        """Do some work on every rank.

        Args:
            phase: for the failure.
            timeout_s: that the work itself keeps to.
            work: gives something that pickles.

        Returns:
            What every rank's work gave, in order of ranks.

        Raises:
            TorchDeltaError: it failed on some rank; the first such failure, on all of them.
            DeadlineExceeded: a rank did not come.
        """
        self._stage += 1
        result, failure, error = None, None, None
        try:
            result = work()
        except Exception as caught:
            error, failure = caught, Failure.of(phase, caught)
        offers: Any = self._crew.exchange(
            f"{self._name}/{self._stage}", (failure, result), timeout_s=timeout_s + _EXTRA_S
        )
        failures = [found for found, _ in offers if found is not None]
        if error is not None:
            raise error
        if failures:
            raise failures[0].error()
        return [result for _, result in offers]


class Background:
    """The thread and its queue.

    Args:
        standing: of the rank.
        crew: all ranks.
        do: does one job.
        name: of this thread among all that the engine ever has, the same on all ranks.
        cpus: processors the thread may use; None to leave it where it is (vLLM ties its own threads to cores, which
            threads started by them inherit).
    """

    def __init__(
        self,
        standing: Standing,
        crew: Crew,
        do: Callable[[Job, Together], None],
        *,
        name: str = "jobs",
        cpus: Collection[int] | None = None,
    ) -> None:
        self._name = name
        self._attach_again = False
        self._standing = standing
        self._crew = crew
        self._do = do
        self._cpus = cpus
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._number = 0
        self.stopped = threading.Event()

    def submit(self, job: Job) -> None:
        """Queue a job, from any thread. Only rank 0's queue counts; the other ranks hear of it."""
        if self._thread is None and not self.stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="torch-delta-prepare", daemon=True)
            self._thread.start()
        if self._crew.rank == 0:
            self._jobs.put(job)

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the thread after the stage it is in."""
        self.stopped.set()
        self._jobs.put(None)
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        self._give_way()
        while True:
            self._number += 1
            job = self._next()
            if job is None or self.stopped.is_set():
                return
            try:
                self._do(job, Together(self._crew, f"{self._name}/{self._number}"))
            except Exception as error:
                if self.stopped.is_set():
                    return
                if isinstance(error, RequestRefused) and self._standing.num_asked > job.asked > 0:
                    logger.info("%s", error)  # a later request took its place, and its outcome is what counts
                    continue
                self._attach_again = job.kind == "attach"
                attaching = job.kind == "prepare" and self._standing.host is None
                failure = self._standing.fail("attach" if attaching else job.kind, error)
                trace = None if isinstance(error, TorchDeltaError) else error
                logger.warning("%s failed: %s", job.kind, failure.message, exc_info=trace)
            finally:
                self._standing.idle(job.asked)

    def _take(self) -> Job | None:
        """The next job of rank 0; where it follows on its own, an attach that failed is tried again."""
        settings = self._standing.settings
        again = self._attach_again and settings is not None and settings.auto_follow
        self._attach_again = False
        try:
            return self._jobs.get(timeout=_AGAIN_S if again else None)
        except queue.Empty:
            return Job("attach")

    def _give_way(self) -> None:
        """Other processors than the threads that generate use, if there are any, and a lower priority."""
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except (AttributeError, OSError) as error:
            logger.info("the background thread runs at the engine's own priority: %s", error)

    def _next(self) -> Job | None:
        if self._crew.rank == 0:
            job = self._take()
            if job is not None:
                self._crew.announce(f"{self._name}/{self._number}", job)
            return job
        while not self.stopped.wait(_HEAR_EVERY_S):
            heard: Any = self._crew.heard(f"{self._name}/{self._number}")
            if heard is not None:
                found: Job = heard
                return found
        return None
