"""Noticing new versions: one small request at a time, from one process of a host; and waiting when nobody answers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar, cast

from torch_delta.errors import CheckpointBusy, ObjectNotFound, StoreUnavailable
from torch_delta.receive.locks import FileLock
from torch_delta.receive.state import Layout
from torch_delta.store import Backoff, poll, retry

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from torch_delta.format.head import Successor
    from torch_delta.receive.local_checkpoint import LocalCheckpoint
    from torch_delta.stream import Stream

logger = logging.getLogger("torch_delta")

T = TypeVar("T")

_LOOK_AROUND_EVERY = 16  # polls between two looks at the hint and the successor


class StreamEnded(Exception):
    """There is nothing more for this checkpoint here.

    Attributes:
        successor: where the stream goes on.
    """

    def __init__(self, successor: Successor) -> None:
        super().__init__(successor)
        self.successor = successor


class Lookout:
    """Waits for a stream on behalf of one follower.

    Args:
        stream: to watch.
        backoff: pauses between questions.
        retry_s: how long the store may give no clear answer.
        stop: ends every wait.
    """

    def __init__(self, stream: Stream, backoff: Backoff, retry_s: float, stop: threading.Event) -> None:
        self._stream = stream
        self._backoff = backoff
        self._retry_s = retry_s
        self._stop = stop
        self._known: int | None = None
        self._end: Successor | None = None

    @property
    def url(self) -> str:
        """Of the stream, for errors."""
        return self._stream.store.url

    def wait_for_stream(self, timeout_s: float | None) -> bool:
        """Until `stream.json` exists (F96, F103); False once stopped."""
        return (
            poll(
                self._stream.load,
                phase="wait for the stream to begin",
                peer=self.url,
                timeout_s=timeout_s,
                stop=self._stop,
                backoff=self._backoff,
                transient=(ObjectNotFound, StoreUnavailable),
            )
            is not None
        )

    def standing(self, checkpoint: LocalCheckpoint) -> int | None:
        """Where a checkpoint stands in this stream; None if it has nothing to build on, or follows another stream."""
        usable = checkpoint.stream_id == self._stream.load()[0].stream_id and not checkpoint.damage
        return checkpoint.version if usable else None

    @property
    def end(self) -> Successor | None:
        """Where this stream goes on, as of the last look around."""
        return self._end

    def newest(self) -> int:
        """The newest version of this stream's history, from the hint; also notices where that history ends.

        Looking around like this finds what probing for the next version cannot: that the stream goes on elsewhere, or
        that retention removed the next version while this reader was away.
        """
        self._end = self._stream.successor()
        self._known = self._stream.head(None)
        return self._limited(self._known)

    def wait(
        self, checkpoint: LocalCheckpoint, now: int | None, target: int | None, timeout_s: float | None
    ) -> int | None:
        """Wait until there is something to do for a checkpoint that stands at `now`.

        Returns:
            The version to go for; where the checkpoint stands if another process moved it; None once stopped.

        Raises:
            StreamEnded: it goes on elsewhere, and nothing that is wanted is left here.
            StoreUnavailable: the store did not answer for `retry_s`.
            DeadlineExceeded: `timeout_s` passed.
        """
        asker = FileLock(Layout(checkpoint.path).hidden / "poll.lock", "ask for new versions")
        num_polls = 0
        silent_since_s: float | None = None

        def look() -> int | None:
            nonlocal num_polls, silent_since_s
            current = self.standing(checkpoint)
            if current != now:
                return current
            if now is not None and not asker.held:
                try:
                    asker.acquire(exclusive=True, timeout_s=0)
                except CheckpointBusy:
                    return None  # another process of this host asks, and this one sees what comes of it (F107)
            try:
                look_around = num_polls % _LOOK_AROUND_EVERY == 0
                newest = self._ask(now, target, nothing_here=not checkpoint.is_unbound, look_around=look_around)
            except StoreUnavailable as error:
                silent_since_s = time.monotonic() if silent_since_s is None else silent_since_s
                if is_local(error) or time.monotonic() - silent_since_s > self._retry_s:
                    raise
                logger.warning("%s does not answer, asking again: %s", self.url, error)
                return None
            num_polls, silent_since_s = num_polls + 1, None
            goal = newest if target is None else min(newest, target)
            return goal if now is None or goal > now else None

        try:
            return poll(
                look,
                phase=f"wait for version {0 if now is None else now + 1}",
                peer=self.url,
                timeout_s=timeout_s,
                stop=self._stop,
                backoff=self._backoff,
                transient=(),
            )
        finally:
            asker.release()

    def _ask(self, now: int | None, target: int | None, *, nothing_here: bool, look_around: bool) -> int:
        if self._known is None or now is None or (look_around and self._known <= now):
            self.newest()
        elif self._known <= now:
            self._known = self._stream.head(now)
        assert self._known is not None
        end = self._end
        has_arrived = nothing_here if now is None else end is not None and now >= end.version
        if end is not None and has_arrived and (target is None or target > end.version):
            raise StreamEnded(end)
        return self._limited(self._known)

    def _limited(self, version: int) -> int:
        return version if self._end is None else min(version, self._end.version)

    def retry(self, attempt: Callable[[], T]) -> T:
        """Repeat while the store gives no clear answer; trouble with this host's disk is not waited out.

        Raises:
            DeadlineExceeded: it gave none for `retry_s`.
        """

        def guarded() -> tuple[T | None, StoreUnavailable | None]:
            try:
                return attempt(), None
            except StoreUnavailable as error:
                if not is_local(error):
                    raise
                return None, error

        result, local_trouble = retry(
            guarded,
            phase="read the stream",
            peer=self.url,
            timeout_s=self._retry_s,
            stop=self._stop,
            backoff=self._backoff,
        )
        if local_trouble is not None:
            raise local_trouble
        return cast("T", result)


def is_local(error: StoreUnavailable) -> bool:
    """Whether it is this host's disk that did not answer, and not the stream's store."""
    return "path" in error.facts
