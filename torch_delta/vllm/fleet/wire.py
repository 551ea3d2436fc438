"""What a fleet asks of a server, whichever routes carry it. Called by the fleet's threads, one at a time per server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch_delta.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.vllm.fleet.http import Deadline, Http
    from torch_delta.vllm.fleet.reports import WorkerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A server's status as the wire got it."""

    workers: tuple[WorkerStatus, ...]
    """In the order of ranks."""
    generation: str
    """Identity of all processes of the server that hold state of ours."""
    owes_reset: bool
    """Its caches hold values of older weights."""
    paused: bool
    """Its scheduler is paused, by whomever; False where the routes do not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """One pause, ended."""

    version: int
    """All workers run it now."""
    pause_s: float
    """Seconds from asking for the pause to its end."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of its parts."""


class Goal(NamedTuple):
    """Where servers shall go."""

    version: int
    stream_id: str | None
    """Of the stream that the version is of; None for the newest of those that continue each other."""

    def as_fields(self) -> dict[str, object]:
        """For a request."""
        return {"version": self.version} | ({} if self.stream_id is None else {"stream_id": self.stream_id})


class Wire(ABC):
    """One server's control routes."""

    def __init__(self, http: Http) -> None:
        self.http = http

    @abstractmethod
    def init(self, init_info: Mapping[str, object], deadline: Deadline) -> None:
        """Tell the server its stream. Idempotent.

        Raises:
            ServerRefused: it does not accept the fields or their values; the message says which.
        """

    @abstractmethod
    def status(self, deadline: Deadline) -> Answered:
        """Statuses of all workers."""

    @abstractmethod
    def prepare(self, goal: Goal, timeout_s: float, deadline: Deadline) -> int:
        """Start fetching a version and return at once.

        Args:
            goal: to fetch.
            timeout_s: when the workers give up; they would not look at the next request before.
            deadline: of this request.

        Returns:
            Number of the request; done once every worker's `answered` is there.

        Raises:
            ServerRefused: a worker does not accept the request.
        """

    @abstractmethod
    def verify(self, deadline: Deadline) -> None:
        """Start a digest of all live weights in the background; `verified_full` of the status has the result."""

    @abstractmethod
    def apply(self, goal: Goal, mode: str, *, timeout_s: float, resume_timeout_s: float) -> Applied:
        """Pause keeping requests, apply a prepared version, reset caches, resume; however it ends, it tried to resume.

        Raises:
            ServerRefused: not applied, or applied and the caches could not be reset (`phase` says).
            ServerUnavailable: connection lost.
            DeadlineExceeded: names the part of the pause.
        """

    @abstractmethod
    def release(self, *, resume_timeout_s: float) -> None:
        """End whatever an interrupted `apply` left behind: an open session, a pause. Harmless otherwise."""


def accepted(answers: object, url: str, phase: str) -> int:
    """Check the replies of all workers to a request.

    Returns:
        The number they gave it; 0 if they gave none.

    Raises:
        ServerRefused: one did not accept it.
    """
    if not isinstance(answers, list) or not answers:
        raise ServerRefused(
            f"{phase}: server {url} answered {str(answers)[:200]!r} instead of one reply per worker; is it ours?",
            url=url,
            phase=phase,
            status=None,
        )
    numbers = [0]
    for rank, answer in enumerate(answers):
        if isinstance(answer, dict) and answer.get("accepted") is True:
            number = answer.get("request")
            numbers.append(number if isinstance(number, int) else 0)
            continue
        error = answer.get("error") if isinstance(answer, dict) else None
        raise worker_refused(url, phase, rank, error if isinstance(error, dict) else {"message": str(answer)[:500]})
    return max(numbers)


def worker_refused(url: str, phase: str, rank: int, error: Mapping[str, object]) -> ServerRefused:
    """The error for a failure that a worker put into its reply or status."""
    facts = error.get("facts")
    kind = error.get("type", "error")
    return ServerRefused(
        f"{phase}: worker {rank} of server {url}: {kind}: {error.get('message', 'no explanation')}",
        url=url,
        phase=phase,
        status=None,
        rank=rank,
        type=kind,
        advice=error.get("action"),
        worker_facts=dict(facts) if isinstance(facts, dict) else {},
    )
