"""Following a stream: waiting for versions, and bringing a local checkpoint to them."""

from __future__ import annotations

import functools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Self

from torch_delta.errors import ChainError, ObjectNotFound, StoreUnavailable
from torch_delta.receive.advance import Advance, Verify
from torch_delta.receive.leasing import LeaseKeeper
from torch_delta.receive.lookout import Lookout, StreamEnded
from torch_delta.receive.reports import ApplyReport, shared
from torch_delta.store import Backoff, Store, open_store
from torch_delta.stream import Stream
from torch_delta.stream.lineages import open_successor, walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch_delta.format.head import Successor
    from torch_delta.format.schema import Schema
    from torch_delta.format.streaminfo import StreamInfo
    from torch_delta.receive.local_checkpoint import LocalCheckpoint

logger = logging.getLogger("torch_delta")

_MOST_REPLANS = 6  # with growing pauses, some three seconds
_LATE = "is_committed"  # fact of a ChainError: the commit is there, so what it names was not deleted by retention


class Follower:
    """A reader of a stream and of what continues it. Needs no GPU, no torch.distributed, no connection to the trainer.

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
        verify: when to digest every byte of the checkpoint before writing to it: ``"start"`` (the first time this
            process writes to it), ``"every"`` version, or ``"never"``. Deltas are proved in any case; this finds bytes
            that something else changed (F14).
        merge_from: fewest pending versions that are decoded together and written once, when no consumer of the
            checkpoint needs them one by one; None takes every version by itself.
        lease_s: life of a lease in the stream, so that retention keeps what this follower still needs even if it is
            slow or away for a while; renewed in time by a thread, deleted by `close`. Needs permission to write. None
            leaves none: a follower that retention overtakes starts again from an anchor.

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
        merge_from: int | None = 4,
        lease_s: int | None = None,
    ) -> None:
        if verify not in {"start", "every", "never"}:
            raise ValueError(f"verify must be 'start', 'every' or 'never', got {verify!r}")
        if num_fetch_threads < 1 or retry_s < 0:
            raise ValueError(f"expected num_fetch_threads >= 1 and retry_s >= 0, got {num_fetch_threads} and {retry_s}")
        if merge_from is not None and merge_from < 2:
            raise ValueError(f"merge_from is {merge_from}; expected at least 2 versions, or None")
        backoff = Backoff(first_s=poll_interval_s, most_s=max(poll_interval_s, most_poll_interval_s))
        self.store = url if isinstance(url, Store) else open_store(url)
        self._stores: list[Store] = [] if isinstance(url, Store) else [self.store]
        self.stream = Stream(self.store)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_fetch_threads, thread_name_prefix="torch-delta-fetch")
        self._lease: LeaseKeeper | None = None
        self._lease_s = lease_s
        self._verify: Verify = verify
        self._merge_from = merge_from
        self._backoff, self._retry_s = backoff, retry_s
        self._read(self.stream)

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
        return self.stream.head(None)

    # -- following --------------------------------------------------------------------------------------------------

    def apply_to(
        self,
        checkpoint: LocalCheckpoint,
        *,
        until: int | Literal["head"] | None = None,
        timeout_s: float | None = None,
        since: tuple[str, int] | None = None,
    ) -> Iterator[ApplyReport]:
        """Bring a checkpoint to version after version; yields once it is proved to be at each.

        A checkpoint with nothing in it, or one that fell behind what the store still has, or whose bits turn out to be
        damaged, starts again from the newest anchor (or, without one, from its base). Another process that follows with
        the same checkpoint may do the work; its versions are reported as ``kind="shared"``, several as one.

        Where the stream was ended by a successor, the follower goes over to it: the checkpoint takes the versions up to
        the fork, and is then version 0 of the stream that goes on, or is replaced by an anchor of it if it is beyond
        the fork or the fork is at no version. `stream` is the new one then, and versions count from 0 again.

        Args:
            checkpoint: of this host.
            until: stop after this version, of whichever stream it is reached in; ``"head"`` for the newest one at the
                time of the call. None goes on until `stop` is called.
            timeout_s: longest wait for the next version, for the stream to exist, and for another process; None waits
                for ever for the first two and the checkpoint's own time for the last.
            since: stream id and version that the caller last knew the checkpoint to be at; if it is elsewhere by now,
                that is reported first. None begins with where it stands.

        Raises:
            BaseMismatch: the checkpoint is not the stream's base, or follows another stream; names the tensors.
            ChainError: no path leads on (a gap), the history was replaced, or the stream goes on where nothing lies;
                says what to do.
            FormatError, DigestMismatch: a version is damaged and no later anchor leads around it.
            UnsupportedFormat: it needs a newer release.
            StoreUnavailable: the store did not answer for `retry_s`, or this host has no room or permission.
            DeadlineExceeded: `timeout_s` passed.
        """
        if not self._lookout.wait_for_stream(timeout_s):
            return
        self._find(checkpoint)
        seen = since
        while not self._stop.is_set():
            try:
                yield from self._apply_lineage(checkpoint, until, timeout_s, seen)
            except StreamEnded as ended:
                before = None if checkpoint.stream_id is None else (self.info.stream_id, ended.successor.version)
                report = self._go_over(checkpoint, ended.successor, timeout_s)
                seen = before if report is None else (report.stream_id, report.version)
                if report is not None:
                    yield report
            else:
                return

    def _standing(self, checkpoint: LocalCheckpoint) -> tuple[str, int] | None:
        """Where a checkpoint stands in the lineage that this follower is in, after following it there."""
        version = self._lookout.standing(checkpoint)
        if version is None and checkpoint.stream_id is not None:
            self._find(checkpoint)  # another process of this host went over before us
            version = self._lookout.standing(checkpoint)
        return None if version is None else (self.info.stream_id, version)

    def _find(self, checkpoint: LocalCheckpoint) -> None:
        """Be in the lineage that the checkpoint follows, if that continues the one this follower is in."""
        wanted = checkpoint.stream_id
        if wanted in {None, self.info.stream_id}:
            return
        way = [*self._lookout.retry(lambda: [*walk(self.stream)])]
        found = next((at for at, lineage in enumerate(way) if lineage.stream.load()[0].stream_id == wanted), 0)
        for at, lineage in enumerate(way[1:], start=1):
            if at != found:
                lineage.stream.store.close()
        if found:
            self._enter(way[found].stream)

    def _enter(self, stream: Stream) -> None:
        """Read another lineage from now on; its store is this follower's. Others may still use the one before."""
        self._stores.append(stream.store)
        self.store, self.stream = stream.store, stream
        self._read(stream)

    def _read(self, stream: Stream) -> None:
        if self._lease is not None:
            self._lease.close()
        self._lease = None if self._lease_s is None else LeaseKeeper(stream, self._lease_s)
        hold = {} if self._lease is None else {"hold": self._lease.hold}
        self._lookout = Lookout(stream, self._backoff, self._retry_s, self._stop)
        self._advance = Advance(stream, self._pool, self._verify, merge_from=self._merge_from, **hold)

    def _go_over(
        self, checkpoint: LocalCheckpoint, successor: Successor, timeout_s: float | None
    ) -> ApplyReport | None:
        before = successor.stream_id
        self._enter(self._lookout.retry(lambda: open_successor(self.stream, successor)))
        change_over = functools.partial(self._advance.change_over, checkpoint, before, successor.version, timeout_s)
        return self._lookout.retry(change_over)

    def _apply_lineage(
        self,
        checkpoint: LocalCheckpoint,
        until: int | Literal["head"] | None,
        timeout_s: float | None,
        seen: tuple[str, int] | None,
    ) -> Iterator[ApplyReport]:
        at = self._standing(checkpoint)
        seen = at if seen is None else seen
        target = None if until == "head" else until
        if until == "head":
            newest = self._lookout.retry(self._lookout.newest)
            target = newest if self._lookout.end is None else None
        if target is not None and at is not None and at[1] > target:
            raise ChainError(
                f"{checkpoint.path} is at version {at[1]}, beyond {target}; versions are not taken back. Use an empty "
                "folder",
                local_version=at[1],
                target=target,
            )
        num_replans, pauses_s = 0, Backoff().waits_s()
        while not self._stop.is_set():
            at = self._standing(checkpoint)
            if at is not None and seen is not None and at != seen:
                yield shared(seen[1], at[1], self.info.stream_id)
            seen = at if at is not None else seen
            now = None if at is None else at[1]
            is_there = target is not None and now is not None and now >= target
            if is_there and not self._advance.owes_proof(checkpoint):
                return
            # Where nothing is newer, what is here is proved, or healed, before that is said.
            goal = target if is_there else self._lookout.wait(checkpoint, now, target, timeout_s)
            if goal is None or (goal == now and not is_there):
                continue  # stopped, or another process did it
            try:
                report = self._lookout.retry(functools.partial(self._advance.step, checkpoint, goal, timeout_s))
            except StoreUnavailable:
                if self._stop.is_set():
                    return
                raise
            except (ObjectNotFound, ChainError) as error:
                # Retention was at work between two requests (F87), or the store shows late what was put. What is there
                # now, or a little later, decides.
                num_replans += 1
                if num_replans > _MOST_REPLANS or not (isinstance(error, ObjectNotFound) or error.facts.get(_LATE)):
                    raise
                logger.warning("planning again: %s", error)
                self._stop.wait(next(pauses_s))
                continue
            num_replans, pauses_s = 0, Backoff().waits_s()
            if report is not None:
                seen = (report.stream_id, report.version)
                yield report

    # -- ending -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let `apply_to` end after the step it is in; from any thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and release threads and the store."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._lease is not None:
            self._lease.close()
        for store in self._stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
