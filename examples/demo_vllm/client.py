"""Somebody who streams one completion after the other, the whole time, and must not notice that weights change."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Self

from examples.demo.sides import DemoFailed

if TYPE_CHECKING:
    from examples.demo_vllm.rollouts import Policy

_TOKENS_EACH = 256


class Client:
    """A thread that streams until the context ends.

    Attributes:
        num_streams: completions that ended with all of their tokens.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_streams = 0
        self._policy = policy
        self._arrivals: list[float] = []
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo-client", daemon=True)

    def _run(self) -> None:
        try:
            for number in itertools.count():
                self._stream([5 + number % 300, 17, 99])
                if self._stop.is_set():
                    return
                self.num_streams += 1
        except BaseException as error:
            self._failure = error

    def _stream(self, prompt: list[int]) -> None:
        num_tokens = 0
        for tokens in self._policy.stream(prompt, _TOKENS_EACH):
            self._arrivals += [time.monotonic()] * len(tokens)
            num_tokens += len(tokens)
            if self._stop.is_set():
                return
        if num_tokens != _TOKENS_EACH:
            raise DemoFailed(f"a stream ended after {num_tokens} of {_TOKENS_EACH} tokens")

    @property
    def num_tokens(self) -> int:
        """So far."""
        return len(self._arrivals)

    def num_between(self, start: float, end: float) -> int:
        """Tokens that arrived between two moments of `time.monotonic()`, which all processes of a machine share."""
        return sum(start <= moment < end for moment in list(self._arrivals))

    def longest_gap_s(self, start: float, end: float) -> float:
        """Longest time without a token that touches the interval."""
        times = list(self._arrivals)
        return max((b - a for a, b in itertools.pairwise(times) if b >= start and a <= end), default=0.0)

    def check(self) -> None:
        """Raise `DemoFailed` if a stream failed."""
        if self._failure is not None:
            raise DemoFailed(f"the client's stream failed: {self._failure}") from self._failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30.0)
