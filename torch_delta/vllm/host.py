"""This host's share of the work: one working copy of the checkpoint, followed by whichever engine gets there first.

Every rank of every engine on the host has a `Host` of its own on the same folder. `receive` sees to it that one of them
downloads and decodes while the others wait and find the work done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch_delta.errors import BaseMismatch, ChainError, RequestRefused, TorchDeltaError
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.receive.base import resolve_base
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.weights import Weights
from torch_delta.store import retry
from torch_delta.vllm.host_records import BringReport, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.receive import ApplyReport, Consumer, Patch
    from torch_delta.vllm.config import Settings

_ANSWER_S = 10.0  # for a store's first answer: an attach that hangs tells nobody what is wrong
_RETRY_S = 30.0


class Host:
    """A rank's hold on the working copy of its host. Used by one background thread, but for `reading`.

    Args:
        settings: of the engine.
        served: folder or Hub id of the served model.
        consumer_id: names this rank among the consumers of the working copy.

    Raises:
        TorchDeltaError: the store has no stream, does not answer, or the working copy cannot be opened; see `Follower`
            and `LocalCheckpoint`.
    """

    def __init__(self, settings: Settings, served: str, consumer_id: str) -> None:
        self.settings = settings
        self.served = served
        self._consumer_id = consumer_id
        self._consumer: Consumer | None = None
        self._lock = threading.Lock()
        self._may_interrupt = self._interrupted = False
        self.follower = self._new_follower()
        self._watcher: Follower | None = None
        self._closed = False
        try:
            retry(
                self.follower.stream.load,
                phase="read the stream",
                peer=settings.stream,
                timeout_s=min(_ANSWER_S, settings.timeout_s),
            )
            settings.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            self.checkpoint = LocalCheckpoint(settings.checkpoint, base=self._base(), timeout_s=settings.timeout_s)
            self._bind()
            self.info, self.schema = self.follower.stream.load()
        except BaseException:
            self.follower.close()
            raise

    def _base(self) -> str | Path:
        folder = Path(self.settings.base)
        return folder if folder.is_dir() else self.settings.base

    def _bind(self) -> None:
        """Prove that an unbound working copy is the stream's base, and make it version 0.

        A copy that another process took over to a successor of the stream is followed there.
        """
        bound = self.checkpoint.stream_id
        expected = self.follower.info.stream_id
        if bound != expected or self.checkpoint.damage:
            for _ in self.follower.apply_to(self.checkpoint, until=0 if bound is None else "head"):
                pass
        if self.checkpoint.stream_id != self.follower.info.stream_id:
            raise BaseMismatch(
                f"{self.checkpoint.path} follows stream {self.checkpoint.stream_id}, {self.settings.stream} is stream "
                f"{expected}; name another checkpoint folder in init_info, or remove this one",
                path=str(self.checkpoint.path),
                expected=expected,
                got=self.checkpoint.stream_id,
            )

    # -- versions ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The working copy is at."""
        version = self.checkpoint.version
        assert version is not None, "bound when it was opened"
        return version

    @property
    def has_moved_on(self) -> bool:
        """Whether the working copy follows another stream by now, one that continues this one; versions start anew."""
        return self.checkpoint.stream_id != self.info.stream_id

    def bring(
        self,
        target: int | None,
        *,
        timeout_s: float,
        stream_id: str | None = None,
        superseded: Callable[[], bool] = lambda: False,
    ) -> BringReport:
        """Bring the working copy to `target`, or to the newest version there is; at once if it is there or beyond.

        A stream that a restarted trainer continues elsewhere is followed there; then `has_moved_on`, and the version is
        the one that was reached when that was noticed.

        Args:
            target: None for the newest.
            timeout_s: for everything.
            stream_id: of the stream that the target is of; None for the newest of those that continue this one.
            superseded: whether a later request asks for another version; then one that is not published is not waited
                for. Asked at the start and after `look_up`.

        Raises:
            TorchDeltaError: see `Follower.apply_to`; a version that is not published in time is `DeadlineExceeded`.
            RequestRefused: superseded.
            ChainError: nothing continues this stream as `stream_id` (yet), or the target is beyond reach.
        """
        reports: list[ApplyReport] = []
        ends_s = time.monotonic() + timeout_s
        is_elsewhere = stream_id not in {None, self.info.stream_id}
        while not self.has_moved_on:
            # A number that is reached here may be meant of the stream that goes on from here: others have ended.
            is_there = target is not None and self.version >= target
            goes_over = is_elsewhere or (is_there and stream_id is None and self._goes_on())
            if is_there and not goes_over:
                break
            until: int | Literal["head"] = "head" if target is None or goes_over else target
            if target is not None and not goes_over and superseded() and not self._is_published(target):
                raise RequestRefused(
                    f"version {target} is not published yet, and a later request asked for another; ask for it again "
                    "once it is",
                    version=target,
                )
            left_s = max(0.0, ends_s - time.monotonic())
            with self._interruptible(target is not None) as follower:
                try:
                    reports.extend(follower.apply_to(self.checkpoint, until=until, timeout_s=left_s))
                except ChainError:
                    if target is None or goes_over or self.version < target:
                        raise  # else another engine moved on past the target between two looks
            if target is None or goes_over or self._closed:
                break
        if is_elsewhere and not self.has_moved_on:
            raise ChainError(
                f"version {target} of stream {stream_id} is asked for; this host follows stream {self.info.stream_id} "
                f"of {self.settings.stream}, and nothing continues that as the other. Is {self.settings.stream} the "
                "stream that is published to?",
                stream_id=self.info.stream_id,
                target=target,
            )
        return BringReport(
            version=self.version,
            num_versions=len(reports),
            num_changed=sum(report.num_changed for report in reports),
            stored_bytes=sum(report.stored_bytes for report in reports),
            wait_s=sum(report.wait_s for report in reports),
            fetch_s=sum(report.fetch_s for report in reports),
            decode_s=sum(report.decode_s for report in reports),
            verify_s=sum(report.verify_s for report in reports),
            apply_s=sum(report.apply_s for report in reports),
        )

    def look_up(self) -> None:
        """Let `bring` ask whether it is superseded, after the step it is in; from any thread."""
        with self._lock:
            if self._may_interrupt:
                self._interrupted = True
                self.follower.stop()

    @contextlib.contextmanager
    def _interruptible(self, interruptible: bool) -> Iterator[Follower]:
        with self._lock:
            self._may_interrupt = interruptible
        try:
            yield self.follower
        finally:
            with self._lock:
                self._may_interrupt = False
                interrupted, self._interrupted = self._interrupted, False
            if interrupted and not self._closed:  # a follower that was stopped stays so
                self.follower.close()
                self.follower = self._new_follower()

    def _new_follower(self) -> Follower:
        return Follower(self.settings.stream, retry_s=min(_RETRY_S, self.settings.timeout_s))

    def _is_published(self, version: int) -> bool:
        try:
            return self.follower.head() >= version
        except TorchDeltaError:
            return False

    def _goes_on(self) -> bool:
        """Whether the stream ended, so that a version that the working copy seems to have is its successor's."""
        with contextlib.suppress(TorchDeltaError):  # a store that does not answer: then what is here is what there is
            return self.follower.stream.successor() is not None
        return False

    def patches(self, start: int, target: int) -> list[Patch]:
        """The patches from version `start` to `target`, in order.

        Raises:
            ChainError: one is not kept, or the working copy went through an anchor: reload.
        """
        found = []
        at = start
        while at < target:
            patch = self.checkpoint.patch(at + 1)
            if patch.since != at or patch.version > target:
                raise ChainError(
                    f"{self.checkpoint.path} went from version {patch.since} to {patch.version} at once, this engine "
                    f"is at {at}; it reloads",
                    local_version=at,
                    target=target,
                )
            found.append(patch)
            at = patch.version
        return found

    def watch(self, on_version: Callable[[int], object]) -> None:
        """Follow the stream until `close`, in a thread of its own.

        Args:
            on_version: is told where the working copy is, and then each version that it reaches, whoever brings it
                there: other processes, and the thread of the `Host` before this one, may move it at any time.
        """
        with Follower(self.settings.stream, retry_s=self.settings.timeout_s) as watcher:
            self._watcher = watcher
            stream_id, version = self.checkpoint.stream_id, self.version
            assert stream_id is not None, "bound when it was opened"
            on_version(version)
            if not self._closed:
                for report in watcher.apply_to(self.checkpoint, since=(stream_id, version)):
                    on_version(report.version)

    # -- reading ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, *, timeout_s: float) -> Iterator[Snapshot]:
        """Hold the working copy still: it is whole and at one version inside the block.

        Raises:
            TorchDeltaError: see `LocalCheckpoint.reading`.
        """
        with self.checkpoint.reading(timeout_s=timeout_s) as path:
            schema = self.checkpoint.schema
            folder = SafetensorsFolder.open(path)
            with Weights(folder, schema, writable=False) as weights:
                digests = dict(zip(schema.data_indices, self.checkpoint.digests, strict=True))
                yield Snapshot(version=self.version, digests=digests, weights=weights)

    def consume(self, version: int) -> None:
        """Keep patches above `version` for this rank from now on. Inside `reading`, the first time."""
        if self._consumer is None:
            self._consumer = self.checkpoint.register_consumer(self._consumer_id, version=version)
        else:
            self._consumer.applied(version)

    def served_version(self, snapshot_digests: Mapping[int, Digest], version: int) -> int | None:
        """Which version the files of the served model are, if they are the base or `version`; reads all of them.

        Args:
            snapshot_digests: of the working copy at `version`.
            version: of the working copy.
        """
        if self.serves_itself:
            return None  # it was `version` or an older one when vLLM read it
        try:
            folder = SafetensorsFolder.open(resolve_base(self.served))
            if folder.differences(self.schema):
                return None
            with Weights(folder, self.schema, writable=False) as weights:
                indices = self.schema.data_indices
                found = dict(zip(indices, weights.digests(indices), strict=True))
        except TorchDeltaError:
            return None
        if found == dict(zip(indices, self.info.base.digests, strict=True)):
            return 0
        return version if found == dict(snapshot_digests) else None

    @property
    def serves_itself(self) -> bool:
        """Whether vLLM was started from the working copy."""
        return Path(self.served).resolve() == self.checkpoint.path.resolve()

    def base_digests(self) -> Mapping[int, Digest]:
        """Of the stream's base, by schema index."""
        return dict(zip(self.schema.data_indices, self.info.base.digests, strict=True))

    def release(self) -> None:
        """Keep no patches for this rank any more; another `Host` of it may."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def close(self) -> None:
        """Let go of everything; the working copy stays."""
        self.release()
        self._closed = True
        watcher = self._watcher
        if watcher is not None:
            watcher.stop()
        self.follower.close()
        self.checkpoint.close()
