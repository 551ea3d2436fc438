"""The coordinator: turns the receipts of all ranks into one commit, or into one error on all of them.

Runs on rank 0 in a thread of its own, one version after the other. The commit object's conditional create is the only
line that makes a version visible. What a reader sees if this process dies: before it, nothing (parts that no commit
names are swept later); at it or after it, the whole version, because every part was readable before.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_delta import crashpoints
from torch_delta.errors import (
    ChainError,
    Fenced,
    FormatError,
    PublishFailed,
    StoreError,
    TorchDeltaError,
)
from torch_delta.publish.anchor_job import AnchorState
from torch_delta.publish.announcing import Announcer
from torch_delta.publish.cadence import Cadence
from torch_delta.publish.drafting import Draft, Drafting, failed
from torch_delta.publish.pulse import Pulse
from torch_delta.publish.records import Aborted, Committed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.config import PublishConfig
    from torch_delta.publish.coordination import Team
    from torch_delta.publish.coverage import Ownership
    from torch_delta.publish.progress import Lineage, Order, StepClock

_logger = logging.getLogger("torch_delta")
_LONGEST_DELAY_S = 10.0
_ORPHAN_AGE_S = 86_400.0
_STOP_S = 5.0


class Committer:
    """Collects receipts, checks them, commits, tells all ranks.

    Args:
        team: rank 0's view of the ranks.
        lineage: where the stream stands when attaching.
        ownership: who owns what, proved.
        clock: the training thread's, for naming the step at which an abort is raised.
        config: deadlines.
    """

    def __init__(
        self, team: Team, lineage: Lineage, ownership: Ownership, clock: StepClock, config: PublishConfig
    ) -> None:
        self.lineage = lineage
        self._team = team
        self._clock = clock
        self._config = config
        self._epoch = 0
        self._pending: Draft | None = None
        self.cadence = Cadence(config, sum(lineage.schema.tensors[t].nbytes for t in lineage.schema.data_indices))
        self._awaited: dict[tuple[int, int], Future[AnchorState]] = {}
        self._state_lock = threading.Lock()
        self._is_fenced = False
        self._pulse = Pulse(lineage.stream, lineage.version, lineage.parent_sha256, config.alive_s)
        self._announcer = Announcer(team)
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._drafting = Drafting(team, ownership, config, self._stopping.is_set)
        self._thread = threading.Thread(target=self._run, name="torch_delta-commit", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Queue a version; called by rank 0's training thread."""
        self._orders.put(order)

    def await_state(self, version: int, epoch: int) -> Future[AnchorState]:
        """What a version that was not submitted yet turns out to be; called by rank 0's training thread.

        Ends with the error of a version that is not committed.
        """
        future: Future[AnchorState] = Future()
        with self._state_lock:
            if epoch < self._epoch:
                future.set_exception(failed(version, {0: "an earlier version failed"}))
            else:
                self._awaited[epoch, version] = future
        return future

    def state(self) -> AnchorState:
        """The newest version; for the training thread, when nothing is in flight."""
        lineage = self.lineage
        return AnchorState(
            stream_id=lineage.stream_id,
            version=lineage.version,
            commit_sha256=lineage.parent_sha256,
            digests=lineage.digests,
        )

    def stop(self, *, wait: bool) -> None:
        """End the thread after the queued orders, or as soon as it can if not `wait`."""
        if not wait:
            self._stopping.set()
        self._orders.put(None)
        self._thread.join(None if wait else _STOP_S)
        self._pulse.stop(is_fenced=self._is_fenced)

    def _run(self) -> None:
        self._sweep()
        while (order := self._orders.get()) is not None and not self._stopping.is_set():
            if order.epoch != self._epoch:
                continue  # collected before this publisher heard of an abort
            try:
                self._complete(order)
            except TorchDeltaError as error:
                self._abort(order, error)
            except Exception as error:
                _logger.exception("the coordinator could not complete version %d", order.version)
                self._abort(order, TorchDeltaError(f"{type(error).__name__}: {error}"))

    def _sweep(self) -> None:
        """Remove what writers left half written when they were killed long ago (F84); never stops training (F88)."""
        try:
            num_removed = self.lineage.stream.store.sweep_temporary(older_than_s=_ORPHAN_AGE_S)
        except StoreError as error:
            _logger.warning("old temporary files could not be removed: %s", error)
        else:
            _logger.debug("%d old temporary files were removed", num_removed)

    def _complete(self, order: Order) -> None:
        if self._pending is not None:
            # Settled first, with the very bytes that may already be there: nothing is numbered on a guess.
            self._commit(self._pending, may_exist=True)
        if order.is_flush:
            return
        draft = self._drafting.draft(order, self.lineage)
        self._announcer.forget_heard(self._drafting.heard_by_all)
        crashpoints.reach("publish.receipts_heard")
        self._pending = draft
        self._commit(draft, may_exist=False)

    def _commit(self, draft: Draft, *, may_exist: bool) -> None:
        """Create the commit object; repeats the same bytes while the store does not say that it worked.

        Args:
            draft: what to commit.
            may_exist: an earlier attempt may have written it. If none can have (a full or read-only disk says so), the
                version is given up at the deadline; else it stays pending, since a reader may see it.
        """
        lineage = self.lineage
        version = draft.commit.version
        deadline = time.monotonic() + self._config.commit_timeout_s
        for delay_s in _delays(self._config.retry_delay_s):
            try:
                sha256 = lineage.stream.write_commit(draft.commit)
                break
            except Fenced:
                raise
            except (ChainError, FormatError) as error:
                # Found before anything is created: the stream is not what this writer left, or cannot be read. An
                # earlier attempt may have got through all the same; then the next look at the stream tells.
                self._pending = None
                raise failed(version, {0: f"{type(error).__name__}: {error.message}"}) from error
            except StoreError as error:
                may_exist = may_exist or getattr(error, "outcome", "unknown") != "absent"
                if time.monotonic() + delay_s > deadline or self._stopping.is_set():
                    if not may_exist:
                        self._pending = None
                        raise failed(version, {0: f"the commit could not be written: {error.message}"}) from error
                    raise failed(
                        version,
                        {
                            0: f"whether the commit was written is not known, the store does not answer: "
                            f"{error.message}. The commit is kept and settled first at the next publish or at close"
                        },
                    ) from error
                _logger.warning("commit of version %d failed, trying again: %s", version, error)
            self._stopping.wait(delay_s)
        self._pending = None
        lineage.version = version
        lineage.parent_sha256 = sha256
        lineage.digests = draft.digests
        committed = Committed(
            version=version,
            num_changed=draft.commit.num_changed,
            stored_bytes=sum(part.stored_bytes for part in draft.commit.parts),
            num_parts=len(draft.commit.parts),
            receipts_s=draft.receipts_s,
            commit_s=time.perf_counter() - draft.started,
        )
        # From here on the version exists: whatever goes wrong is no reason to tell anybody otherwise.
        try:
            self._pulse.tell(version, sha256)
        except TorchDeltaError as error:
            _logger.warning("the head hint of version %d was not written, readers probe for it: %s", version, error)
        crashpoints.reach("publish.committed")
        self._answer(version)
        if self.cadence.note(committed):
            committed = replace(committed, is_anchor_due=True)
        self._announcer.tell(committed.to_bytes())
        self._announcer.forget_leftovers()

    def _abort(self, order: Order, error: TorchDeltaError) -> None:
        if not isinstance(error, PublishFailed | Fenced):
            error = failed(order.version, {0: f"{type(error).__name__}: {error.message}"})
        self._is_fenced = self._is_fenced or isinstance(error, Fenced)
        next_version = self.lineage.version + 1 + (self._pending is not None)
        last = order.version + self._config.max_in_flight
        self._announcer.leave(self._epoch, range(order.version, last + 1))
        with self._state_lock:
            lost = [key for key in self._awaited if key[1] >= next_version]
            for key in lost:
                self._awaited.pop(key).set_exception(error)
            self._epoch += 1
        with self._clock.lock:
            if self._clock.is_stepped:
                # See StepClock; one rank alone has nobody to wait for.
                at_step = self._clock.count + (2 if self._team.world_size > 1 else 1)
            else:
                # Without steps, publish number n waits for the outcome of number n - max_in_flight on every rank.
                at_step = order.step + self._config.max_in_flight
            self._announcer.tell(Aborted(error=error, at_step=at_step, next_version=next_version).to_bytes())

    def _answer(self, version: int) -> None:
        """Hand out the state of a version that an anchor waits for."""
        with self._state_lock:
            for key in [key for key in self._awaited if key[1] == version]:
                self._awaited.pop(key).set_result(self.state())


def _delays(first_s: float) -> Iterator[float]:
    delay_s = max(first_s, 0.01)
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
