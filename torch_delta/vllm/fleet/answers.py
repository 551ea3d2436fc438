"""Parses what workers say about themselves. An unknown field is kept in `raw` and never a reason to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch_delta.errors import ServerRefused
from torch_delta.vllm.fleet.reports import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

_PREPARING = ("init", "attach", "prepare")


def workers_of(answers: object, url: str) -> tuple[WorkerStatus, ...]:
    """Statuses of all workers of a server, in the order of ranks.

    Args:
        answers: the JSON list, one object per worker.
        url: of the server, for errors.

    Raises:
        ServerRefused: this is not a list of statuses.
    """
    if not isinstance(answers, list) or not answers:
        raise _not_a_status(url, f"expected one status per worker, got {str(answers)[:200]!r}")
    workers = [_worker(answer, url) for answer in answers]
    return tuple(sorted(workers, key=lambda worker: worker.rank))


def version_of(workers: Sequence[WorkerStatus]) -> int | None:
    """The version all workers run; None if they differ or one does not know."""
    versions = {worker.version for worker in workers}
    return versions.pop() if len(versions) == 1 else None


def stream_id_of(workers: Sequence[WorkerStatus]) -> str | None:
    """The stream that all workers' versions are of; None if they differ or one does not know."""
    found = {worker.stream_id for worker in workers}
    return found.pop() if len(found) == 1 else None


def prepared_of(workers: Sequence[WorkerStatus]) -> int | None:
    """Highest version that every worker can apply or already runs; None if one has neither."""
    highest = [max((v for v in (w.prepared, w.version) if v is not None), default=None) for w in workers]
    known = [version for version in highest if version is not None]
    return min(known) if len(known) == len(highest) else None


def generation_of(workers: Sequence[WorkerStatus]) -> str:
    """Identity of the processes together; changes when any of them is another one."""
    return "+".join(worker.generation for worker in workers)


def failure_of(workers: Sequence[WorkerStatus]) -> tuple[int, Mapping[str, object]] | None:
    """Rank and error of the first worker that has one."""
    return next(((worker.rank, worker.error) for worker in workers if worker.error is not None), None)


def prepare_failure_of(workers: Sequence[WorkerStatus], number: int) -> tuple[int, Mapping[str, object]] | None:
    """Rank and error of the first worker that failed at a request to prepare.

    Args:
        workers: of a server.
        number: of the request. Before a worker has dealt with it, and where the error is of something else, such as an
            update that was refused, what it says is old.
    """
    done = [worker for worker in workers if worker.preparing is None and worker.answered >= number]
    return next(
        (
            (worker.rank, worker.error)
            for worker in done
            if worker.error is not None and worker.error.get("phase", "prepare") in _PREPARING
        ),
        None,
    )


def _worker(answer: object, url: str) -> WorkerStatus:
    if not isinstance(answer, dict):
        raise _not_a_status(url, f"expected an object, got {str(answer)[:200]!r}")

    def field(name: str, kind: type[T]) -> T | None:
        value = answer.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _not_a_status(url, f"field {name!r} should be {kind.__name__}, got {str(value)[:200]!r}")
        return value

    return WorkerStatus(
        rank=field("rank", int) or 0,
        generation=field("generation", str) or "",
        initialised=bool(field("initialised", bool)),
        stream=field("stream", str),
        stream_id=field("stream_id", str),
        state=field("state", str),
        version=field("version", int),
        prepared=field("prepared", int),
        answered=field("answered", int) or 0,
        preparing=field("preparing", dict),
        error=field("error", dict),
        dirty=field("dirty", str),
        ready=bool(field("ready", bool)),
        session=bool(field("session", bool)),
        raw=answer,
    )


def _not_a_status(url: str, why: str) -> ServerRefused:
    return ServerRefused(
        f"status: server {url} does not answer like a torch_delta engine: {why}; was it started with "
        """--weight-transfer-config '{"backend": "torch_delta"}' and torch-delta installed?""",
        url=url,
        phase="status",
        status=None,
    )
