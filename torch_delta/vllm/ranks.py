"""The ranks of one engine telling each other things, outside the collectives that the model uses.

An engine's ranks (tensor, pipeline, expert parallel) commit or undo together, so each must know how the others fared.
Their exchange goes through the key-value store of the process group: any thread may use it, every wait has a deadline,
and nothing waits in a queue that the model's own communication shares. Offers are pickled, as everything is that vLLM's
ranks tell each other; nothing from outside the engine comes this way.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from torch_delta.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.01
_KEPT_KEYS = 64  # own keys that somebody may still have to read; far more than a job uses


class Crew(Protocol):
    """All ranks of one engine, seen by one of them.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def exchange(self, topic: str, offer: object, *, timeout_s: float) -> list[object]:
        """Give every rank every rank's offer, in order of ranks. Collective: every rank calls it with the same topic.

        Args:
            topic: used once in the life of the engine.
            offer: anything that pickles.
            timeout_s: for the slowest rank to arrive.

        Raises:
            DeadlineExceeded: a rank did not arrive; names the topic and the rank.
        """

    def announce(self, name: str, job: object) -> None:
        """Rank 0: say what the job `name` is."""

    def heard(self, name: str) -> object | None:
        """Other ranks: the job `name`, or None while rank 0 has not announced it."""


class Solo:
    """The crew of an engine with a single rank."""

    rank = 0
    size = 1

    def exchange(self, topic: str, offer: object, *, timeout_s: float) -> list[object]:  # noqa: ARG002 - nobody to wait for
        """See `Crew.exchange`."""
        return [offer]

    def announce(self, name: str, job: object) -> None:
        """Nobody to tell."""

    def heard(self, name: str) -> object | None:
        """Never called: rank 0 hears nothing."""
        raise AssertionError(f"rank 0 announces job {name}")


class KeyValues(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that exists."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class StoreCrew:
    """A crew whose ranks meet in a key-value store.

    Args:
        store: of the process group, with a prefix of this engine's own.
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, store: KeyValues, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._written: deque[str] = deque()
        self._lock = threading.Lock()

    def exchange(self, topic: str, offer: object, *, timeout_s: float) -> list[object]:
        """See `Crew.exchange`."""
        self._put(f"{topic}/{self.rank}", offer)
        deadline = time.monotonic() + timeout_s
        offers: list[object] = []
        for rank in range(self.size):
            key = f"{topic}/{rank}"
            pause_s = _FIRST_PAUSE_S
            while not self._store.check([key]):
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"rank {rank} did not come to {topic!r} within {timeout_s:g} s (this is rank {self.rank}); see "
                        "its log, and restart the engine if it hangs",
                        phase=topic,
                        peer=f"rank {rank}",
                        timeout_s=timeout_s,
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            offers.append(self._load(key))
        return offers

    def announce(self, name: str, job: object) -> None:
        """See `Crew.announce`."""
        self._put(f"job/{name}", job)

    def heard(self, name: str) -> object | None:
        """See `Crew.heard`."""
        key = f"job/{name}"
        return self._load(key) if self._store.check([key]) else None

    def _put(self, key: str, offer: object) -> None:
        with self._lock:
            self._store.set(key, pickle.dumps(offer))
            self._written.append(key)
            if len(self._written) > _KEPT_KEYS:
                self._store.delete_key(self._written.popleft())

    def _load(self, key: str) -> object:
        value: object = pickle.loads(self._store.get(key))  # noqa: S301 - written by a rank of this engine
        return value
