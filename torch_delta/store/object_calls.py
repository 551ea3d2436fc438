"""One operation of an object store: attempts with backoff up to a deadline, and the errors it ends in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from torch_delta.errors import ObjectExists, ObjectNotFound, StoreUnavailable
from torch_delta.store.object_answers import Answer, understand
from torch_delta.store.waiting import Backoff

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

T = TypeVar("T")

# All that obstore raises for a request: its own classes, FileNotFoundError, and what reading a body may add.
OBSTORE_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError)


class Call:
    """One operation: counts its attempts, waits between them, and words its errors.

    Args:
        url: of the store; the peer in every error.
        operation: the store's method; the phase in every error.
        key: of the object, or the prefix of a listing.
        timeout_s: no attempt starts later than this.
        stop: set when the store closes.
        unclear: fact `outcome` if time runs out: ``"unknown"`` for writes, ``"absent"`` for reads.
    """

    def __init__(
        self, url: str, operation: str, key: str, *, timeout_s: float, stop: threading.Event, unclear: str = "absent"
    ) -> None:
        self.url = url
        self.operation = operation
        self.key = key
        self.outcome = unclear
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._stop = stop
        self._waits_s = Backoff().waits_s()
        self._num_attempts = 0

    def again(self) -> Call:
        """The same operation with its time starting afresh: for a chunk that waited for its turn."""
        return Call(
            self.url, self.operation, self.key, timeout_s=self._timeout_s, stop=self._stop, unclear=self.outcome
        )

    def start_attempt(self) -> None:
        """Count an attempt.

        Raises:
            StoreUnavailable: the store is closed.
        """
        if self._stop.is_set():
            raise self.closed()
        self._num_attempts += 1

    def wait(self, error: Exception, answer: Answer) -> None:
        """Wait for the next attempt.

        Raises:
            StoreUnavailable: time is up or the store closes; chained from `error`.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0 or self._stop.wait(min(next(self._waits_s), left_s)):
            raise self.unavailable(answer) from error

    def repeat(self, attempt: Callable[[], T]) -> T:
        """Repeat an idempotent attempt until it answers.

        Raises:
            ObjectNotFound: the answer is that there is no such object.
            StoreUnavailable: refused for good, or no answer in time.
        """
        while True:
            self.start_attempt()
            try:
                return attempt()
            except obstore_errors() as error:
                answer = understand(error)
                if answer.kind == "absent":
                    raise self.not_found() from error
                if answer.kind != "unclear":
                    raise self.unavailable(answer) from error
                self.wait(error, answer)

    def closed(self) -> StoreUnavailable:
        """The error of a closed store."""
        return StoreUnavailable(
            f"{self.url}: {self.operation} {self.key}: the store is closed",
            key=self.key,
            url=self.url,
            operation=self.operation,
            outcome=self.outcome if self._num_attempts else "absent",
        )

    def not_found(self) -> ObjectNotFound:
        """The error for a clear no."""
        return ObjectNotFound(
            f"{self.url}: there is no object {self.key}", key=self.key, url=self.url, operation=self.operation
        )

    def exists(self) -> ObjectExists:
        """The error for a name that is taken."""
        return ObjectExists(
            f"{self.url}: {self.key} exists already", key=self.key, url=self.url, operation=self.operation
        )

    def unavailable(self, answer: Answer, *, outcome: str | None = None) -> StoreUnavailable:
        """The error for everything else: names phase, peer, deadline and what to do."""
        times = f" {self._num_attempts} attempts," if self._num_attempts > 1 else ""
        limit = f" within {self._timeout_s:g} s" if answer.kind == "unclear" else ""
        return StoreUnavailable(
            f"{self.url}: {self.operation} {self.key or '(root)'} got no result{limit}:{times} {answer.said}. "
            f"{answer.advice or 'Repeat'}",
            key=self.key,
            url=self.url,
            operation=self.operation,
            outcome=self.outcome if outcome is None else outcome,
            phase=f"{self.operation} {self.key}",
            peer=self.url,
            timeout_s=self._timeout_s,
            status=answer.status,
        )


def obstore_errors() -> tuple[type[Exception], ...]:
    """What a request may raise. A function, because obstore is imported on first use only."""
    from obstore.exceptions import BaseError

    return (BaseError, *OBSTORE_ERRORS)
