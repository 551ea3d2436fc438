"""The publisher: what a training loop holds. Everything here runs on the training thread; see `Publisher`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from torch_delta.capture.source import StepSource
from torch_delta.errors import DigestMismatch, Fenced, PublishFailed, TorchDeltaError
from torch_delta.publish import at_exit
from torch_delta.publish.anchor_turns import AnchorTurns
from torch_delta.publish.anchoring import Anchoring
from torch_delta.publish.committer import Committer
from torch_delta.publish.farewell import say_farewell
from torch_delta.publish.inflight import InFlight, Versions
from torch_delta.publish.keyvalue import await_value, get_blob
from torch_delta.publish.pipeline import Job, Timings, Uploader
from torch_delta.publish.progress import Order, StepClock, outcome_key
from torch_delta.publish.records import Aborted, read_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch_delta.capture.source import OwnedBox
    from torch_delta.codec.change import Change
    from torch_delta.events import AnchorReport, PublishReport, RetentionReport
    from torch_delta.publish.anchors import AnchorState
    from torch_delta.publish.coverage import TensorBox
    from torch_delta.publish.lineage import Opening

_logger = logging.getLogger("torch_delta")
_FAREWELL_S = 60.0
_FAREWELL_AFTER_FAILURE_S = 5.0  # enough to hear of it; a rank that died is not waited for much longer


class Publisher:
    """Publishes a change source as versions of a stream. One per rank; made by `attach` or `attach_source`.

    Every method is called by every rank, in the same order, on the training thread, like the training loop itself; none
    is a collective, except that `anchor` and `close` wait for the other ranks. `version` and `reports` are this rank's
    own knowledge and may be read anywhere.

    Life of a version: `publish` collects the changes and returns; background threads encode and upload them; the
    coordinator (rank 0) commits once it has every rank's receipt. What goes wrong on any rank surfaces on all of them,
    in the same optimizer step, as one `PublishFailed` with `.failures` by rank. The next version then covers the
    changes, so a loop may catch it and go on. `wait`, `close` and the `publish` that needs the outcome raise at once.
    `Fenced` is final: another writer owns the stream.

    Args:
        opening: what `open_lineage` agreed with the other ranks; its source is closed with the publisher.
        closes_store: whether the store is closed with the publisher.
    """

    def __init__(self, opening: Opening, *, closes_store: bool = True) -> None:
        job = opening.anchor_job
        self._source = job.source
        self._store = job.store
        self._config = job.config
        self._opening = opening
        self._closes_store = closes_store
        self._team = job.team
        self._clock = StepClock()
        self._versions = Versions(opening.version)
        self._epoch = 0
        self._num_heard = 0
        self._owned: Sequence[OwnedBox] | None = opening.owned
        self._failure: Aborted | None = None
        self._fenced: TorchDeltaError | None = None
        self._closed = False
        self._reports: deque[PublishReport] = deque(maxlen=job.config.max_reports)
        self._uploader = Uploader(job.store, job.source.schema, opening.stream_id, job.team, job.config)
        self._committer: Committer | None = None
        if opening.lineage is not None and opening.ownership is not None:
            self._committer = Committer(job.team, opening.lineage, opening.ownership, self._clock, job.config)
        cadence = None if self._committer is None else self._committer.cadence
        self._anchoring = Anchoring(dataclasses.replace(job, team=job.team.apart("anchor")), cadence)
        self._turns = AnchorTurns(job.config)
        self._unhook: Callable[[], None] = lambda: None
        if opening.wants_anchor:
            self._anchoring.submit(opening.version, job.source, self._newest_state())
        if isinstance(job.source, StepSource):
            self._clock.is_stepped = True
            self._unhook = job.source.on_step(self._after_step)

    @property
    def version(self) -> int:
        """The last version this rank knows to be committed."""
        return self._versions.committed

    @property
    def reports(self) -> tuple[PublishReport, ...]:
        """Reports of committed versions, oldest first; the last `config.max_reports` of them."""
        return tuple(self._reports)

    def publish(self) -> int:
        """Collect what changed since the last version and publish it in the background; nothing changed is a version.

        Waits (back-pressure) while `max_in_flight` versions are not committed yet.

        Returns:
            The number the version gets if it succeeds; `wait` tells. The same on every rank.

        Raises:
            PublishFailed: an earlier version failed; nothing was collected by this call.
            Fenced: another writer owns the stream.
            DeadlineExceeded: the coordinator does not answer.
        """
        self._check_open()
        if not self._clock.is_stepped:
            self._clock.advance()
        return self._publish()

    def wait(self, version: int | None = None, *, timeout_s: float | None = None) -> PublishReport:
        """Wait until a version is committed.

        Args:
            version: as returned by `publish`; None is the newest.
            timeout_s: None is `config.wait_timeout_s`.

        Raises:
            PublishFailed: it was not committed; raised by this call on every rank, and then not again.
            DeadlineExceeded: no outcome yet; the version is still in flight.
            ValueError: no such version was published, or its report is no longer kept.
        """
        self._check_open()
        newest = self._versions.newest
        target = newest if version is None else version
        if target > newest:
            raise ValueError(f"version {target} was not published yet, the newest is {newest}")
        self._settle(target, self._config.wait_timeout_s if timeout_s is None else timeout_s)
        report = next((report for report in self._reports if report.version == target), None)
        if report is None:
            raise ValueError(f"version {target} was not published by this publisher, or its report is no longer kept")
        return report

    def anchor(self) -> AnchorReport:
        """Write a full copy of the newest version as a checkpoint folder, from all ranks' shards, without gathering.

        Waits for the versions in flight first, then for the other ranks, and until the anchor exists; `request_anchor`
        does not. The weights may already be ahead: the copy is of the last version.

        Raises:
            PublishFailed: a version in flight failed; on every rank.
            TorchDeltaError: the anchor failed, on every rank, with `.failures`.
        """
        self._check_open()
        self._settle(self._versions.newest, self._config.wait_timeout_s)
        try:
            return self._anchoring.submit(self.version, self._source, self._newest_state()).result()
        except TorchDeltaError:
            self._anchoring.error = None  # told here and now
            raise

    def _newest_state(self) -> Future[AnchorState] | None:
        """On rank 0, while nothing is in flight: the newest version, as `Anchoring.submit` wants it."""
        if self._committer is None:
            return None
        state: Future[AnchorState] = Future()
        state.set_result(self._committer.state())
        return state

    def request_anchor(self) -> None:
        """Let the next version have an anchor, written in the background. Called by every rank, at the same step."""
        self._check_open()
        self._turns.want()

    @property
    def anchors(self) -> tuple[AnchorReport, ...]:
        """Anchors written by this publisher, oldest first; the last `config.max_reports` of them."""
        return self._anchoring.reports

    @property
    def retention(self) -> RetentionReport | None:
        """The last time room was made, on rank 0, if `config.retention` says so."""
        return self._anchoring.retention

    def close(self) -> None:
        """Wait for what is in flight, anchors too, stop the threads, leave optimizer and model as before. Idempotent.

        Steps since the last `publish` are not published. On rank 0 it also waits a while for the other ranks, because
        the process that leaves first often takes the key-value store with it.

        Raises:
            PublishFailed: the last version was not committed; on every rank. The publisher is closed all the same.
            DigestMismatch: the newest anchor was not written, because the shards are not what was published.
        """
        if self._closed:
            return
        try:
            if self._fenced is None:
                self._settle(self._versions.newest, self._config.wait_timeout_s)
            self._anchoring.stop(wait=self._fenced is None)
            say_farewell(self._team, _FAREWELL_S)
            if isinstance(self._anchoring.error, DigestMismatch):
                raise self._anchoring.error
        except (PublishFailed, Fenced):
            # The other ranks have yet to hear of it, from the key-value store that may go with this process.
            say_farewell(self._team, _FAREWELL_AFTER_FAILURE_S)
            raise
        finally:
            self.detach()

    def detach(self) -> None:
        """Stop at once: hooks are removed, versions in flight may or may not be committed. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        at_exit.forget(self)
        self._unhook()
        self._anchoring.stop(wait=False)
        self._uploader.stop(wait=not len(self._versions))
        if self._committer is not None:
            self._committer.stop(wait=not len(self._versions))
        self._source.close()
        if self._closes_store or self._opening.has_moved:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may be gone; waiting for them would hide the error that ends the block.
            self.detach()

    def _after_step(self, _number: int) -> None:
        """Called by the source after every optimizer step."""
        self._clock.advance()
        self._hear()
        self._raise_due()
        if self._config.every is not None and self._clock.count % self._config.every == 0:
            self._publish()

    def _publish(self) -> int:
        if self._fenced is not None:
            raise self._fenced
        waiting_since = time.perf_counter()
        self._hear()
        self._raise_due()
        while len(self._versions) >= self._config.max_in_flight and self._failure is None:
            self._await_outcome(self._config.wait_timeout_s)
        self._raise_due()
        version = self._versions.next()
        self._collect(version, time.perf_counter() - waiting_since)
        return version

    def _start_anchor(self, version: int, error: TorchDeltaError | None) -> None:
        """Start an anchor of the version that was just collected; on every rank, also on one that could not."""
        state = None if self._committer is None else self._committer.await_state(version, self._epoch)
        self._anchoring.submit(version, self._source if error is None else error, state)

    def _collect(self, version: int, back_pressure_s: float) -> None:
        started = time.perf_counter()
        takes_anchor = self._turns.takes(version)
        collected, error = None, None
        try:
            self._source.wants_ranks = self._uploader.wants_ranks
            collected = self._source.collect()
        except Exception as failed:
            # Told to the coordinator, so that all ranks raise it in the same step instead of this one alone now.
            _logger.exception("rank %d could not collect version %d", self._team.rank, version)
            error = failed if isinstance(failed, TorchDeltaError) else TorchDeltaError(f"collecting failed: {failed!r}")
        if takes_anchor:
            self._start_anchor(version, error)
        entry = InFlight(
            version=version,
            # The background thread drops the changes when they are uploaded; nobody else may hold them.
            collected=None if collected is None else dataclasses.replace(collected, changes=()),
            timings=Timings(),
            started=started,
            capture_s=time.perf_counter() - started,
            back_pressure_s=back_pressure_s,
        )
        self._versions.add(entry)
        changes = () if collected is None else collected.changes
        if self._failure is None:
            self._submit(entry, changes, error)
        # Else it is lost together with the version that failed, and that is raised at the step all ranks raise at. It
        # was collected all the same: other ranks may not have heard yet, and some sources communicate in `collect`.

    def _submit(self, entry: InFlight, changes: tuple[Change, ...], error: TorchDeltaError | None) -> None:
        self._uploader.submit(
            Job(
                version=entry.version,
                epoch=self._epoch,
                changes=changes,
                error=error,
                owned=self._new_ownership(),
                num_heard=self._num_heard,
                timings=entry.timings,
            )
        )
        if self._committer is not None:
            self._committer.submit(Order(version=entry.version, epoch=self._epoch, step=self._clock.count))

    def _new_ownership(self) -> tuple[TensorBox, ...] | None:
        owned = self._source.owned
        if owned is self._owned:
            return None
        changed = self._owned is None or list(owned) != list(self._owned)
        self._owned = owned
        return tuple((item.tensor, item.box) for item in owned) if changed else None

    def _hear(self) -> None:
        """Read the outcomes that are there; never waits."""
        while (data := get_blob(self._team.kv, outcome_key(self._num_heard))) is not None:
            self._take(data)

    def _await_outcome(self, timeout_s: float) -> None:
        self._take(
            await_value(
                self._team.kv,
                outcome_key(self._num_heard),
                timeout_s=timeout_s,
                phase=f"outcome of version {self.version + 1}",
                peer="rank 0 (coordinator)",
            )
        )

    def _take(self, data: bytes) -> None:
        self._num_heard += 1
        outcome = read_outcome(data)
        if isinstance(outcome, Aborted):
            self._failure = outcome
            return
        if outcome.is_anchor_due:
            self._turns.hear_due(outcome.version)
        entry = self._versions.settle(outcome.version)
        self._source.commit(entry.token)
        self._reports.append(entry.report(outcome, self._opening))
        if self._team.is_coordinator:
            _logger.info("%s", self._reports[-1])

    def _settle(self, target: int, timeout_s: float) -> None:
        """Wait until `target` is committed; raise what stands in its way."""
        deadline = time.monotonic() + timeout_s
        if self._fenced is not None and self.version < target:
            raise self._fenced
        unsettled = self._versions.unsettled
        if unsettled and not len(self._versions) and self._failure is None and self._committer is not None:
            self._committer.submit(
                Order(version=min(unsettled), epoch=self._epoch, step=self._clock.count, is_flush=True)
            )
        while self.version < target:
            if self._failure is not None:
                self._raise()
            self._await_outcome(max(deadline - time.monotonic(), 0.0))

    def _raise_due(self) -> None:
        if self._failure is not None and self._clock.count >= self._failure.at_step:
            self._raise()

    def _raise(self) -> None:
        """Raise the failure at hand, with everything set back so that the next version covers what was lost."""
        failure = self._failure
        assert failure is not None
        self._failure = None
        if isinstance(failure.error, Fenced):
            self._fenced = failure.error
        self._turns.lose(failure.next_version)
        token = self._versions.lose(failure.next_version)
        if token is not None:
            self._source.rollback(token)
        self._epoch += 1
        self._uploader.drop_before(self._epoch)
        self._owned = None  # whether the coordinator got the last change of it is not known: say it again
        raise failure.error

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this publisher is closed; attach again to go on")
