"""Following a stream: waiting for versions, and bringing a local checkpoint to them."""

from __future__ import annotations

import functools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Self, TypeVar, cast

from torch_delta.errors import ChainError, CheckpointBusy, ObjectNotFound, StoreUnavailable
from torch_delta.receive.advance import Advance, Verify
from torch_delta.receive.locks import FileLock
from torch_delta.receive.reports import ApplyReport
from torch_delta.receive.state import Layout
from torch_delta.store import Backoff, Store, open_store, poll, retry
from torch_delta.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from torch_delta.format.head import Successor
    from torch_delta.format.schema import Schema
    from torch_delta.format.streaminfo import StreamInfo
    from torch_delta.receive.local_checkpoint import LocalCheckpoint

logger = logging.getLogger("torch_delta")

T = TypeVar("T")

_MOST_REPLANS = 5
_LOOK_AROUND_EVERY = 16  # polls between two looks at the hint and the successor


class Follower:
    """A reader of one stream. Needs no GPU, no torch.distributed and no connection to the trainer.

        with Follower("s3://bucket/run-7") as follower:
            for report in follower.apply_to(checkpoint):
                print(report.version, report.num_changed, report.stored_bytes)

    Threads: `stop` may be called from any thread; everything else by one thread at a time.

    Args:
        url: of the stream, or an open store (which stays open).
        poll_interval_s: longest pause before the next question while versions keep coming.
        most_poll_interval_s: longest pause when they do not; pauses grow from one to the other, with jitter. Of all
            followers of one checkpoint on a host, one asks the store and the others watch the checkpoint.
        retry_s: how long a store may give no clear answer before that is an error.
        num_fetch_threads: parallel downloads.
        verify: when to digest every byte of the checkpoint before writing to it: ``"start"`` (the first time this object
            writes to it), ``"every"`` version, or ``"never"``. Deltas are proved in any case; this finds bytes that
            something else changed (F14).

    Raises:
        StoreUnavailable: there is no such store, or an extra is missing.
    """

    def __init__(
        self,
        url: str | Store,
        *,
        poll_interval_s: float = 0.5,
        most_poll_interval_s: float = 5.0,
        retry_s: float = 300.0,
        num_fetch_threads: int = 8,
        verify: Verify = "start",
    ) -> None:
        if verify not in {"start", "every", "never"}:
            raise ValueError(f"verify must be 'start', 'every' or 'never', got {verify!r}")
        if num_fetch_threads < 1 or retry_s < 0:
            raise ValueError(f"expected num_fetch_threads >= 1 and retry_s >= 0, got {num_fetch_threads} and {retry_s}")
        self._backoff = Backoff(first_s=poll_interval_s, most_s=max(poll_interval_s, most_poll_interval_s))
        self._owns_store = not isinstance(url, Store)
        self.store = url if isinstance(url, Store) else open_store(url)
        self.stream = Stream(self.store)
        self._retry_s = retry_s
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_fetch_threads, thread_name_prefix="torch-delta-fetch")
        self._advance = Advance(self.stream, self._pool, verify)
        self._head: int | None = None
        self._successor: Successor | None = None

    # -- what the stream says ---------------------------------------------------------------------------------------

    @property
    def info(self) -> StreamInfo:
        """Identity and base of the stream; same errors as `head`."""
        return self.stream.load()[0]

    @property
    def schema(self) -> Schema:
        """Tensors of the stream; same errors as `head`."""
        return self.stream.load()[1]

    def head(self) -> int:
        """The newest version now.

        Raises:
            ObjectNotFound: there is no stream here (yet).
            UnsupportedFormat: the stream needs a newer release.
            StoreUnavailable: no clear answer.
        """
        self._head = self.stream.head(None)
        return self._head

    # -- following --------------------------------------------------------------------------------------------------

    def apply_to(
        self,
        checkpoint: LocalCheckpoint,
        *,
        until: int | Literal["head"] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[ApplyReport]:
        """Bring a checkpoint to version after version; yields once it is proved to be at each.

        A checkpoint with nothing in it, or one that fell behind what the store still has, or whose bits turn out to be
        damaged, starts again from the newest anchor (or, without one, from its base). Another process that follows with
        the same checkpoint may do the work; its versions are reported as ``kind="shared"``, several as one.

        Args:
            checkpoint: of this host.
            until: stop after this version; ``"head"`` for the newest one at the time of the call. None goes on until
                `stop` is called.
            timeout_s: longest wait for the next version, for the stream to exist, and for another process; None waits
                for ever for the first two and the checkpoint's own time for the last.

        Raises:
            BaseMismatch: the checkpoint is not the stream's base, or follows another stream; names the tensors.
            ChainError: no path leads on (a gap), the history was replaced (a fork), or the stream was continued elsewhere;
                says how to go on.
            FormatError, DigestMismatch: a version is damaged and no later anchor leads around it.
            UnsupportedFormat: it needs a newer release.
            StoreUnavailable: the store did not answer for `retry_s`, or this host has no room or permission.
            DeadlineExceeded: `timeout_s` passed.
        """
        if not self._wait_for_stream(timeout_s):
            return
        seen = self._usable_version(checkpoint)
        target = self._retry(self.head) if until == "head" else until
        if target is not None and seen is not None and seen > target:
            raise ChainError(
                f"{checkpoint.path} is at version {seen}, beyond {target}; versions are not taken back. Use an empty folder",
                local_version=seen,
                target=target,
            )
        num_replans = 0
        while not self._stop.is_set():
            now = self._usable_version(checkpoint)
            if now is not None and seen is not None and now != seen:
                yield _shared(seen, now)
            seen = now if now is not None else seen
            if target is not None and now is not None and now >= target:
                return
            goal = self._next_goal(checkpoint, now, target, timeout_s)
            if goal is None or goal == now:
                continue  # stopped, or another process did it
            try:
                report = self._retry(functools.partial(self._advance.step, checkpoint, goal, timeout_s))
            except ObjectNotFound:
                # Retention was at work between two requests (F87). What is there now decides.
                num_replans += 1
                if num_replans > _MOST_REPLANS:
                    raise
                continue
            num_replans = 0
            if report is not None:
                seen = report.version
                yield report

    def _usable_version(self, checkpoint: LocalCheckpoint) -> int | None:
        """Where the checkpoint stands in this stream; None for nothing to build on (or another stream: `step` refuses)."""
        usable = checkpoint.stream_id == self.info.stream_id and not checkpoint.damage
        return checkpoint.version if usable else None

    def _next_goal(
        self, checkpoint: LocalCheckpoint, now: int | None, target: int | None, timeout_s: float | None
    ) -> int | None:
        """Wait until there is something to do.

        Returns:
            The version to go for; `now` or another version of the checkpoint if another process changed it; None once
            stopped.
        """
        asker = FileLock(Layout(checkpoint.path).hidden / "poll.lock", "ask for new versions")
        num_polls = 0
        silent_since_s: float | None = None

        def look() -> int | None:
            nonlocal num_polls, silent_since_s
            current = self._usable_version(checkpoint)
            if current != now:
                return current
            if now is not None and not asker.held:
                try:
                    asker.acquire(exclusive=True, timeout_s=0)
                except CheckpointBusy:
                    return None  # another process of this host asks, and this one sees what comes of it (F107)
            try:
                head = self._ask(now, look_around=num_polls % _LOOK_AROUND_EVERY == 0)
            except StoreUnavailable as error:
                silent_since_s = silent_since_s or time.monotonic()
                if _is_local(error) or time.monotonic() - silent_since_s > self._retry_s:
                    raise
                logger.warning("%s does not answer, asking again: %s", self.store.url, error)
                return None
            num_polls, silent_since_s = num_polls + 1, None
            goal = head if target is None else min(head, target)
            return goal if now is None or goal > now else None

        try:
            return poll(
                look,
                phase=f"wait for version {0 if now is None else now + 1}",
                peer=self.store.url,
                timeout_s=timeout_s,
                stop=self._stop,
                backoff=self._backoff,
                transient=(),
            )
        finally:
            asker.release()

    def _ask(self, now: int | None, *, look_around: bool) -> int:
        """The newest version of this stream's history; one small request, and a few more now and then.

        Looking around finds what probing for the next version cannot: that the stream was continued elsewhere, or that
        retention removed the next version while this reader was away.
        """
        known = self._head
        if known is None or now is None or (look_around and known <= now):
            self._successor = self.stream.successor()
            known = self.stream.head(None)
        elif known <= now:
            known = self.stream.head(now)
        self._head = known
        end = self._successor
        if end is not None and now is not None and now >= end.version:
            raise ChainError(
                f"{self.store.url} ended at version {end.version}; it goes on as stream {end.successor_id} at {end.root!r} "
                "beside it. This release does not change over by itself: follow that URL, with another checkpoint folder",
                local_version=now,
                target=end.version + 1,
                successor=end.root,
            )
        return known if end is None else min(known, end.version)

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Repeat while the store gives no clear answer; trouble with this host's disk is not waited out."""

        def guarded() -> tuple[T | None, StoreUnavailable | None]:
            try:
                return attempt(), None
            except StoreUnavailable as error:
                if not _is_local(error):
                    raise
                return None, error

        result, local_trouble = retry(
            guarded,
            phase="read the stream",
            peer=self.store.url,
            timeout_s=self._retry_s,
            stop=self._stop,
            backoff=self._backoff,
        )
        if local_trouble is not None:
            raise local_trouble
        return cast("T", result)

    def _wait_for_stream(self, timeout_s: float | None) -> bool:
        """Until `stream.json` exists (F96, F103); False once stopped."""
        return (
            poll(
                self.stream.load,
                phase="wait for the stream to begin",
                peer=self.store.url,
                timeout_s=timeout_s,
                stop=self._stop,
                backoff=self._backoff,
                transient=(ObjectNotFound, StoreUnavailable),
            )
            is not None
        )

    # -- ending -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let `apply_to` end after the step it is in; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and release threads and the store."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_local(error: StoreUnavailable) -> bool:
    """Whether it is this host's disk that did not answer, and not the stream's store."""
    return "path" in error.facts


def _shared(before: int, now: int) -> ApplyReport:
    """Another process of this host did the work."""
    return ApplyReport(
        version=now,
        from_version=before,
        kind="shared",
        num_changed=0,
        stored_bytes=0,
        full_bytes=0,
        fetch_s=0.0,
        decode_s=0.0,
        verify_s=0.0,
        apply_s=0.0,
        wait_s=0.0,
    )
