"""This host's share of the work: one working copy of the checkpoint, followed by whichever engine gets there first.

Every rank of every engine on the host has a `Host` of its own on the same folder. `receive` sees to it that one of them
downloads and decodes while the others wait and find the work done.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch_delta.errors import BaseMismatch, ChainError, TorchDeltaError
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.receive.base import resolve_base
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.weights import Weights
from torch_delta.store import retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.receive import ApplyReport, Consumer, Patch
    from torch_delta.vllm.config import Settings

_ANSWER_S = 10.0  # for a store's first answer: an attach that hangs tells nobody what is wrong
_RETRY_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The working copy, held still.

    Attributes:
        version: it is at.
        digests: of every tensor with data, by schema index.
        weights: its bits; valid while the snapshot is held.
    """

    version: int
    digests: Mapping[int, Digest]
    weights: Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class BringReport:
    """What bringing the working copy to a version took; 0 where another process did it."""

    version: int
    """It is at now."""
    num_versions: int
    """Steps that were taken here."""
    num_changed: int
    """Elements they set."""
    stored_bytes: int
    """Fetched from the store."""
    wait_s: float
    """Seconds for other processes of this host."""
    fetch_s: float
    """Seconds of downloads."""
    decode_s: float
    """Seconds of checking and decoding."""
    verify_s: float
    """Seconds of digests of whole tensors."""
    apply_s: float
    """Seconds of writing the working copy."""


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
        self.follower = Follower(settings.stream, retry_s=min(_RETRY_S, settings.timeout_s))
        self._watcher = Follower(self.follower.store, retry_s=settings.timeout_s)
        try:
            self.info, self.schema = retry(
                self.follower.stream.load,
                phase="read the stream",
                peer=settings.stream,
                timeout_s=min(_ANSWER_S, settings.timeout_s),
            )
            settings.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            self.checkpoint = LocalCheckpoint(settings.checkpoint, base=self._base(), timeout_s=settings.timeout_s)
            self._bind()
        except BaseException:
            self._watcher.close()
            self.follower.close()
            raise

    def _base(self) -> str | Path:
        folder = Path(self.settings.base)
        return folder if folder.is_dir() else self.settings.base

    def _bind(self) -> None:
        """Prove that an unbound working copy is the stream's base, and make it version 0."""
        bound = self.checkpoint.stream_id
        if bound is None or self.checkpoint.damage:
            for _ in self.follower.apply_to(self.checkpoint, until=0 if bound is None else "head"):
                pass
        if self.checkpoint.stream_id != self.info.stream_id:
            raise BaseMismatch(
                f"{self.checkpoint.path} follows stream {self.checkpoint.stream_id}, {self.settings.stream} is stream "
                f"{self.info.stream_id}; name another checkpoint folder in init_info, or remove this one",
                path=str(self.checkpoint.path),
                expected=self.info.stream_id,
                got=self.checkpoint.stream_id,
            )

    # -- versions ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The working copy is at."""
        version = self.checkpoint.version
        assert version is not None, "bound when it was opened"
        return version

    def bring(self, target: int | None, *, timeout_s: float) -> BringReport:
        """Bring the working copy to `target`, or to the newest version there is; at once if it is there or beyond.

        Raises:
            TorchDeltaError: see `Follower.apply_to`; a version that is not published in time is `DeadlineExceeded`.
        """
        reports: list[ApplyReport] = []
        if target is None or self.version < target:
            until: int | Literal["head"] = "head" if target is None else target
            try:
                reports.extend(self.follower.apply_to(self.checkpoint, until=until, timeout_s=timeout_s))
            except ChainError:
                if target is None or self.version < target:
                    raise  # else another engine moved on past the target between two looks
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
        """Follow the stream until `close`, in a thread of its own; tells each version that the working copy reached."""
        for report in self._watcher.apply_to(self.checkpoint):
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

    def close(self) -> None:
        """Let go of everything; the working copy stays."""
        if self._consumer is not None:
            self._consumer.close()
        self._watcher.stop()
        self.follower.close()
        self.checkpoint.close()
