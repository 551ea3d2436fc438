"""Waiting for something another process does: backoff with jitter, a deadline that names phase and peer, and a way out.

All waits go through an `Event`, so that `close()` on another thread ends them at once; nothing here sleeps.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch_delta.errors import DeadlineExceeded, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """How long to wait between attempts: growing, bounded, and never in step with other hosts."""

    first_s: float = 0.05
    """Longest first wait, seconds."""
    most_s: float = 5.0
    """Longest of all waits, seconds."""
    factor: float = 2.0
    """Growth from one wait to the next."""
    jitter: float = 0.5
    """Share of each wait that is random, 0 to 1: a wait of w becomes uniform in [w * (1 - jitter), w]."""

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.most_s:
            raise ValueError(f"expected 0 < first_s <= most_s, got {self.first_s} and {self.most_s}")
        if self.factor < 1 or not 0 <= self.jitter <= 1:
            raise ValueError(f"expected factor >= 1 and jitter in 0..1, got {self.factor} and {self.jitter}")

    def waits_s(self, uniform: Callable[[], float] = random.random) -> Iterator[float]:
        """The endless series of waits, in seconds.

        Args:
            uniform: source of randomness in [0, 1); tests pass their own.
        """
        wait_s = self.first_s
        while True:
            yield wait_s * (1 - self.jitter * uniform())
            wait_s = min(wait_s * self.factor, self.most_s)


def retry(
    attempt: Callable[[], T],
    *,
    phase: str,
    peer: str,
    timeout_s: float,
    stop: threading.Event | None = None,
    backoff: Backoff | None = None,
    transient: tuple[type[Exception], ...] = (StoreUnavailable,),
) -> T:
    """Repeat an idempotent operation until it answers. The first attempt is made at once, whatever the deadline.

    Args:
        attempt: the operation; must be safe to repeat (`get`, `create_or_same`, ...; not `put_new` with an iterator).
        phase: what is being done, for the error: ``"write commit 7"``.
        peer: whom we wait for, for the error: a store's URL, ``"rank 3"``.
        timeout_s: no attempt starts later than this after the call; a running one is not interrupted.
        stop: ends the waiting from another thread; the last error is raised then.
        backoff: waits between attempts.
        transient: errors worth another attempt; any other passes through.

    Raises:
        DeadlineExceeded: time is up; chained from the last error.
    """
    stop = stop if stop is not None else threading.Event()
    deadline_s = time.monotonic() + timeout_s
    waits_s = (backoff if backoff is not None else Backoff()).waits_s()
    for num_attempts, wait_s in enumerate(waits_s, start=1):
        try:
            return attempt()
        except transient as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise _late(phase, peer, timeout_s, f"{num_attempts} attempts, the last: {error}") from error
            if stop.wait(min(wait_s, left_s)):
                raise
    raise AssertionError("unreachable")


def poll(
    probe: Callable[[], T | None],
    *,
    phase: str,
    peer: str,
    timeout_s: float | None,
    stop: threading.Event | None = None,
    backoff: Backoff | None = None,
    transient: tuple[type[Exception], ...] = (StoreUnavailable,),
) -> T | None:
    """Ask again and again until the answer is not None.

    Args:
        probe: the question; None means not yet.
        phase: what is awaited, for the error: ``"version 12"``.
        peer: who should make it happen, for the error.
        timeout_s: give up after this long; None waits until `stop`.
        stop: ends the waiting from another thread.
        backoff: waits between questions.
        transient: errors that count as not yet; the last is chained to `DeadlineExceeded`, so they do not vanish.

    Returns:
        The answer, or None if `stop` was set.

    Raises:
        DeadlineExceeded: time is up.
    """
    stop = stop if stop is not None else threading.Event()
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    trouble: Exception | None = None
    for wait_s in (backoff if backoff is not None else Backoff()).waits_s():
        try:
            answer = probe()
        except transient as error:
            trouble = error
        else:
            trouble = None
            if answer is not None:
                return answer
        left_s = float("inf") if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            why = f"the last answer was an error: {trouble}" if trouble is not None else "it did not happen"
            raise _late(phase, peer, timeout_s, why) from trouble
        if stop.wait(min(wait_s, left_s)):
            return None
    raise AssertionError("unreachable")


def _late(phase: str, peer: str, timeout_s: float | None, why: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{phase}: no success within {timeout_s:g} s at {peer}; {why}", phase=phase, peer=peer, timeout_s=timeout_s
    )
