"""One operation of a remote store: attempts with backoff up to a deadline, and the errors it ends in.

The backends differ in what their clients raise; each brings a function that turns an error into an `Answer`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from torch_delta.errors import ObjectExists, ObjectNotFound, StoreUnavailable
from torch_delta.store.waiting import Backoff

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

T = TypeVar("T")
Kind = Literal["absent", "taken", "no bucket", "past the end", "refused", "unclear"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an error of one request says.

    Attributes:
        kind: ``"absent"`` and ``"taken"`` are answers; ``"no bucket"`` and ``"refused"`` will not change by repeating;
            ``"unclear"`` may, and leaves open whether a write happened.
        said: the service's or network's words, short, on one line.
        advice: what a person can do.
        status: HTTP status, or None if there was no reply.
        after_s: the service asked not to be asked again for so long, seconds.
    """

    kind: Kind
    said: str
    advice: str
    status: int | None
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Language:
    """How a client says that something went wrong.

    Attributes:
        errors: all that a request may raise. A function, because clients are imported on first use only.
        understand: what one of them means.
    """

    errors: Callable[[], tuple[type[Exception], ...]]
    understand: Callable[[Exception], Answer]


class Call:
    """One operation: counts its attempts, waits between them, and words its errors.

    Args:
        language: of the client.
        url: of the store; the peer in every error.
        operation: the store's method; the phase in every error.
        key: of the object, or the prefix of a listing.
        timeout_s: no attempt starts later than this.
        stop: set when the store closes.
        unclear: fact `outcome` if time runs out: ``"unknown"`` for writes, ``"absent"`` for reads.
    """

    def __init__(
        self,
        language: Language,
        url: str,
        operation: str,
        key: str,
        *,
        timeout_s: float,
        stop: threading.Event,
        unclear: str = "absent",
    ) -> None:
        self.url = url
        self.operation = operation
        self.key = key
        self.outcome = unclear
        self._language = language
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._stop = stop
        self._waits_s = Backoff().waits_s()
        self._num_attempts = 0

    def again(self) -> Call:
        """The same operation with its time starting afresh: for a chunk that waited for its turn."""
        return Call(
            self._language,
            self.url,
            self.operation,
            self.key,
            timeout_s=self._timeout_s,
            stop=self._stop,
            unclear=self.outcome,
        )

    def start_attempt(self) -> None:
        """Count an attempt.

        Raises:
            StoreUnavailable: the store is closed.
        """
        if self._stop.is_set():
            raise self.closed()
        self._num_attempts += 1

    def wait(self, error: Exception | None, answer: Answer) -> None:
        """Wait for the next attempt.

        Raises:
            StoreUnavailable: time is up or the store closes; chained from `error`.
        """
        left_s = self._deadline_s - time.monotonic()
        wait_s = max(next(self._waits_s), answer.after_s)
        if left_s <= 0 or self._stop.wait(min(wait_s, left_s)):
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
            except self._language.errors() as error:
                answer = self._language.understand(error)
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
