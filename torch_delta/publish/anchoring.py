"""Anchors in the background: every rank copies its boxes at one version, and training goes on while they are uploaded.

    collect of version w ──► snapshot (one pass over the shard, the only time training waits) ──► this thread:
    stage ──► assemble ──► rank 0 waits until w is committed, compares all digests with it, writes the manifest

All ranks take the snapshot at the same version, because all of them decide by what they all know: the version's number,
a call that every rank makes, or an outcome that every rank has read by then. If w is not committed, its anchor is not
written either, on any rank.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch_delta.errors import DigestMismatch, PublishFailed, TorchDeltaError
from torch_delta.publish.anchors import write_anchor
from torch_delta.publish.snapshot import Snapshot
from torch_delta.stream.collect import collect_garbage
from torch_delta.stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_delta.capture.source import Bits, ChangeSource, OwnedBox, Region
    from torch_delta.events import AnchorReport, RetentionReport
    from torch_delta.format.box import Box
    from torch_delta.publish.anchor_job import AnchorJob, AnchorSource, AnchorState
    from torch_delta.publish.cadence import Cadence

_logger = logging.getLogger("torch_delta")
_STOP_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AnchorOrder:
    """One anchor to write."""

    version: int
    source: AnchorSource
    state: Future[AnchorState] | None
    """On rank 0: what the version turns out to be; ends with the error of a version that was not committed."""
    done: Future[AnchorReport]


class _NoSource:
    """A rank without a copy: every rank hears why, in the first agreement about the anchor."""

    def __init__(self, why: TorchDeltaError) -> None:
        self._why = why

    @property
    def owned(self) -> Sequence[OwnedBox]:
        """Never returns."""
        raise self._why

    def regions(self) -> Iterator[Region]:
        """Never returns."""
        raise self._why

    def read(self, tensor: int, box: Box) -> Bits:  # noqa: ARG002 - of the protocol
        """Never returns."""
        raise self._why


class Anchoring:
    """Writes anchors in a thread of its own, one after the other, in the order in which all ranks submit them.

    Args:
        job: of this rank; its source is replaced by the snapshots. Its team is for this thread alone.
        cadence: on rank 0, told what became of each anchor.
    """

    def __init__(self, job: AnchorJob, cadence: Cadence | None) -> None:
        self._job = job
        self._cadence = cadence
        self._orders: queue.SimpleQueue[AnchorOrder | None] = queue.SimpleQueue()
        self._reports: deque[AnchorReport] = deque(maxlen=job.config.max_reports)
        self._stopping = threading.Event()
        self.error: TorchDeltaError | None = None
        """Why the newest anchor was not written; None if it was."""
        self.retention: RetentionReport | None = None
        """The last pass of retention, on rank 0."""
        self._thread: threading.Thread | None = None

    @property
    def reports(self) -> tuple[AnchorReport, ...]:
        """Anchors that exist, oldest first."""
        return tuple(self._reports)

    def submit(
        self, version: int, source: ChangeSource | TorchDeltaError, state: Future[AnchorState] | None
    ) -> Future[AnchorReport]:
        """Write an anchor of a version; called by the training thread, which waits for the copy of the shard only.

        Args:
            version: that the source was collected for.
            source: what to copy; or why this rank cannot take part, which all the others then hear.
            state: on rank 0, what the version turns out to be.
        """
        order = AnchorOrder(version=version, source=self._copy(source), state=state, done=Future())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torch_delta-anchor", daemon=True)
            self._thread.start()
        self._orders.put(order)
        return order.done

    def stop(self, *, wait: bool) -> None:
        """End the thread after the anchors that were submitted, or as soon as it can if not `wait`."""
        if self._thread is None:
            return
        if not wait:
            self._stopping.set()
        self._orders.put(None)
        self._thread.join(self._job.config.attach_timeout_s if wait else _STOP_S)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._stopping.is_set():
            try:
                report = self._write(order)
            except Exception as error:
                failed = error if isinstance(error, TorchDeltaError) else TorchDeltaError(f"anchor failed: {error!r}")
                self._note(order, failed)
            else:
                self.error = None
                self._reports.append(report)
                if self._cadence is not None:
                    _logger.info("%s", report)
                    self._cadence.written(order.version)
                    self._make_room()
                order.done.set_result(report)
            finally:
                if isinstance(order.source, Snapshot):
                    order.source.close()

    def _copy(self, source: ChangeSource | TorchDeltaError) -> AnchorSource:
        if isinstance(source, TorchDeltaError):
            return _NoSource(source)
        try:
            return Snapshot(source, self._job.config.anchor_spool_dir)
        except TorchDeltaError as error:
            return _NoSource(error)

    def _write(self, order: AnchorOrder) -> AnchorReport:
        def state() -> AnchorState | None:
            return None if order.state is None else order.state.result(self._job.config.wait_timeout_s)

        report = write_anchor(self._job, order.version, state, order.source)
        seconds = order.source.seconds if isinstance(order.source, Snapshot) else 0.0
        return dataclasses.replace(report, snapshot_s=seconds, total_s=report.total_s + seconds)

    def _note(self, order: AnchorOrder, failed: TorchDeltaError) -> None:
        self.error = failed
        if self._cadence is not None:
            self._cadence.failed()
        if isinstance(failed, DigestMismatch):
            _logger.error("anchor of version %d: %s", order.version, failed)
        elif isinstance(failed, PublishFailed):
            _logger.info("no anchor of version %d, which was not committed", order.version)
        else:
            _logger.warning("anchor of version %d was not written: %s", order.version, failed)
        order.done.set_exception(failed)

    def _make_room(self) -> None:
        """After an anchor is when older ones become needless. Deleting never stops training (F88)."""
        if self._job.config.retention is None:
            return
        try:
            self.retention = collect_garbage(Stream(self._job.store), self._job.config.retention)
            _logger.info("%s", self.retention)
        except TorchDeltaError as error:
            _logger.warning("retention in %s: %s", self._job.store.url, error)
