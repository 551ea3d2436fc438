"""Following a stream: waiting for versions, and bringing a local checkpoint to them."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Self

from torch_delta.errors import ChainError, ObjectNotFound, StoreUnavailable
from torch_delta.receive.advance import Advance, Verify
from torch_delta.receive.lookout import Lookout
from torch_delta.receive.reports import ApplyReport, shared
from torch_delta.store import Backoff, Store, open_store
from torch_delta.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch_delta.format.schema import Schema
    from torch_delta.format.streaminfo import StreamInfo
    from torch_delta.receive.local_checkpoint import LocalCheckpoint

_MOST_REPLANS = 5


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
        verify: when to digest every byte of the checkpoint before writing to it: ``"start"`` (the first time this
            process writes to it), ``"every"`` version, or ``"never"``. Deltas are proved in any case; this finds bytes
            that something else changed (F14).

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
        backoff = Backoff(first_s=poll_interval_s, most_s=max(poll_interval_s, most_poll_interval_s))
        self._owns_store = not isinstance(url, Store)
        self.store = url if isinstance(url, Store) else open_store(url)
        self.stream = Stream(self.store)
        self._stop = threading.Event()
        self._lookout = Lookout(self.stream, backoff, retry_s, self._stop)
        self._pool = ThreadPoolExecutor(num_fetch_threads, thread_name_prefix="torch-delta-fetch")
        self._advance = Advance(self.stream, self._pool, verify)

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
            ChainError: no path leads on (a gap), the history was replaced (a fork), or the stream goes on elsewhere;
                says what to do.
            FormatError, DigestMismatch: a version is damaged and no later anchor leads around it.
            UnsupportedFormat: it needs a newer release.
            StoreUnavailable: the store did not answer for `retry_s`, or this host has no room or permission.
            DeadlineExceeded: `timeout_s` passed.
        """
        if not self._lookout.wait_for_stream(timeout_s):
            return
        seen = self._lookout.standing(checkpoint)
        target = self._lookout.retry(self._lookout.newest) if until == "head" else until
        if target is not None and seen is not None and seen > target:
            raise ChainError(
                f"{checkpoint.path} is at version {seen}, beyond {target}; versions are not taken back. Use an empty "
                "folder",
                local_version=seen,
                target=target,
            )
        num_replans = 0
        while not self._stop.is_set():
            now = self._lookout.standing(checkpoint)
            if now is not None and seen is not None and now != seen:
                yield shared(seen, now)
            seen = now if now is not None else seen
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
