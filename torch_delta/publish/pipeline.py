"""The background side of one rank: encode what was collected, upload it, leave a receipt for the coordinator.

The training thread hands over a `Job` per version and goes on. One thread takes jobs in order; within a version up to
`num_encode_threads` helpers encode and upload parts at the same time. Whatever goes wrong ends up in the receipt: the
coordinator hears of it, decides, and every rank learns the same outcome. Nothing is raised here.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta import crashpoints
from torch_delta.codec.encode import encode_changes
from torch_delta.errors import StoreError, StoreUnavailable, TorchDeltaError
from torch_delta.format.commit import PartRef
from torch_delta.format.keys import new_nonce, part_key
from torch_delta.format.limits import MAX_SLICES
from torch_delta.format.part import PartHeader, encode_part
from torch_delta.publish.keyvalue import put_blob
from torch_delta.publish.records import Receipt, SliceRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.codec.change import Change
    from torch_delta.config import PublishConfig
    from torch_delta.format.box import Box
    from torch_delta.format.schema import Schema
    from torch_delta.publish.coordination import Team
    from torch_delta.store.base import BytesLike, Store

_logger = logging.getLogger("torch_delta")
_LONGEST_DELAY_S = 10.0
_STOP_S = 5.0
_FEWEST_TELLING_BYTES = 1 << 20
_SPEED_WEIGHT = 0.25
_MAX_CHANGES = MAX_SLICES // 2  # a codec may cut a change into several slices


@dataclass(slots=True)
class Timings:
    """Seconds this rank's background threads spent on one version; complete before the receipt is set."""

    encode_s: float = 0.0
    upload_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, encode_s: float, upload_s: float) -> None:
        """Called by several threads."""
        with self.lock:
            self.encode_s += encode_s
            self.upload_s += upload_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One version of one rank, on its way into the store."""

    version: int
    epoch: int
    """Counts aborts; jobs of an earlier epoch are dropped."""
    changes: tuple[Change, ...]
    error: TorchDeltaError | None
    """Why nothing could be collected; the receipt passes it on."""
    owned: tuple[tuple[int, Box], ...] | None
    """New ownership of this rank, see `Receipt.owned`."""
    num_heard: int
    """See `Receipt.num_heard`."""
    timings: Timings


def receipt_key(epoch: int, version: int, rank: int) -> str:
    """Where a rank leaves its receipt."""
    return f"receipt/{epoch}/{version}/{rank}"


class LinkSpeed:
    """How fast this rank uploads, from the parts it has uploaded. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_s: float | None = None

    def add(self, stored_bytes: int, seconds: float) -> None:
        """One part went up. Small ones measure the store's answer time, not the link, and do not count."""
        if stored_bytes < _FEWEST_TELLING_BYTES or seconds <= 0:
            return
        with self._lock:
            known = self._bytes_per_s
            speed = stored_bytes / seconds
            self._bytes_per_s = speed if known is None else known + _SPEED_WEIGHT * (speed - known)

    @property
    def bytes_per_s(self) -> float | None:
        """Moving average over parts; None before the first part that tells."""
        return self._bytes_per_s


class Uploader:
    """Encodes and uploads the versions of one rank in a thread of its own.

    Args:
        store: shared with the training thread.
        schema: of the stream.
        stream_id: of the stream, for the parts' headers.
        team: whose coordinator gets the receipts.
        config: encodings, sizes, attempts.
    """

    def __init__(self, store: Store, schema: Schema, stream_id: str, team: Team, config: PublishConfig) -> None:
        self._store = store
        self._schema = schema
        self._stream_id = stream_id
        self._team = team
        self._config = config
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._epoch = 0
        self.link = LinkSpeed()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(config.num_encode_threads, "torch_delta-part")
        # Not the same one: a part waits for its frames, and in one pool those could wait for parts to end.
        self._frames = ThreadPoolExecutor(config.num_encode_threads, "torch_delta-encode")
        self._thread = threading.Thread(target=self._run, name="torch_delta-upload", daemon=True)
        self._thread.start()

    @property
    def wants_ranks(self) -> bool:
        """Whether the next version should be coded in profile *small*, as chosen or by the measured link."""
        if "packed" not in self._config.usable_encodings or self._config.profile == "fast":
            return False
        speed = self.link.bytes_per_s
        return self._config.profile == "small" or speed is None or speed < self._config.small_below_bytes_per_s

    def submit(self, job: Job) -> None:
        """Queue a version; called by the training thread, which bounds how many are in flight."""
        self._jobs.put(job)

    def drop_before(self, epoch: int) -> None:
        """Forget the jobs of earlier epochs; one that is being uploaded stops after its current part."""
        self._epoch = epoch

    def stop(self, *, wait: bool) -> None:
        """End the thread after the queued jobs, or as soon as it can if not `wait`."""
        if not wait:
            self._stopping.set()
        self._jobs.put(None)
        self._thread.join(None if wait else _STOP_S)
        for pool in (self._pool, self._frames):
            pool.shutdown(wait=wait, cancel_futures=not wait)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._stopping.is_set():
            if job.epoch >= self._epoch:
                self._handle(job)
            del job  # the changes of a version are large; do not hold them while waiting for the next

    def _handle(self, job: Job) -> None:
        try:
            receipt = self._process(job)
            put_blob(self._team.kv, receipt_key(job.epoch, job.version, self._team.rank), receipt.to_bytes())
            crashpoints.reach("publish.receipt_set")
        except Exception:
            # The key-value store is gone; the training thread meets the same at its next look.
            _logger.exception("rank %d could not leave its receipt for version %d", self._team.rank, job.version)

    def _process(self, job: Job) -> Receipt:
        if job.error is not None:
            return Receipt(error=job.error, num_heard=job.num_heard)
        try:
            groups = _split(job.changes, self._config.part_bytes)
            results = [self._pool.submit(self._upload, job, seq, group) for seq, group in enumerate(groups)]
            uploaded = [result.result() for result in results]
        except TorchDeltaError as error:
            return Receipt(error=error, num_heard=job.num_heard)
        except Exception as error:
            _logger.exception("rank %d could not encode version %d", self._team.rank, job.version)
            failed = TorchDeltaError(f"encoding failed: {type(error).__name__}: {error}")
            return Receipt(error=failed, num_heard=job.num_heard)
        return Receipt(
            parts=tuple(part for part, _ in uploaded),
            slices=tuple(record for _, records in uploaded for record in records),
            owned=job.owned,
            num_heard=job.num_heard,
        )

    def _upload(self, job: Job, seq: int, changes: Sequence[Change]) -> tuple[PartRef, list[SliceRecord]]:
        if job.epoch < self._epoch or self._stopping.is_set():
            raise TorchDeltaError(f"part {seq} of version {job.version} was not uploaded: the version is dropped")
        started = time.perf_counter()
        encoded = encode_changes(
            self._schema,
            changes,
            level=self._config.zstd_level,
            absolute_only=self._config.absolute_only,
            encodings=self._config.usable_encodings,
            pool=self._frames if self._config.num_encode_threads > 1 else None,
        )
        header = PartHeader(stream_id=self._stream_id, version=job.version, rank=self._team.rank, seq=seq)
        pieces = encode_part(header, encoded.frames, encoded.payloads, schema=self._schema)
        crashpoints.reach("publish.encoded")
        encoded_at = time.perf_counter()
        records = [
            SliceRecord(tensor=part.tensor, box=part.box, increment=part.increment)
            for frame in encoded.frames
            for part in frame.slices
        ]
        key, stored_bytes = self._put(job, seq, pieces)
        crashpoints.reach("publish.part_put")
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        job.timings.add(encoded_at - started, time.perf_counter() - encoded_at)
        ref = PartRef(
            key=key,
            stored_bytes=stored_bytes,
            sha256=digest.hexdigest(),
            rank=self._team.rank,
            num_slices=len(records),
            num_changed=sum(part.count for frame in encoded.frames for part in frame.slices),
        )
        return ref, records

    def _put(self, job: Job, seq: int, pieces: Sequence[BytesLike]) -> tuple[str, int]:
        """Upload under a name nobody used; another name for each attempt, so no reply that got lost can confuse."""
        delay_s = self._config.retry_delay_s
        for attempt in range(1, self._config.num_put_attempts + 1):
            key = part_key(job.version, self._team.rank, seq, new_nonce())
            try:
                started = time.perf_counter()
                stored_bytes = self._store.put_new(key, pieces).size_bytes
            except StoreUnavailable as error:
                if attempt == self._config.num_put_attempts or self._stopping.is_set() or job.epoch < self._epoch:
                    raise
                _logger.warning("attempt %d to upload %s failed, trying again: %s", attempt, key, error)
            else:
                self.link.add(stored_bytes, time.perf_counter() - started)
                return key, stored_bytes
            self._stopping.wait(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        raise StoreError(f"no attempt to upload part {seq} of version {job.version} was made", operation="put_new")


def _split(changes: Sequence[Change], part_bytes: int) -> list[list[Change]]:
    """Consecutive groups of about `part_bytes` each, at least one change per group; none for no changes."""
    groups: list[list[Change]] = []
    filled = part_bytes
    for change in changes:
        if filled >= part_bytes or len(groups[-1]) >= _MAX_CHANGES:
            groups.append([])
            filled = 0
        groups[-1].append(change)
        filled += change.count * (4 + change.new.itemsize)
    return groups
