"""One step of one checkpoint along its stream: a delta, or an anchor where no delta leads on or something is wrong.

state of the checkpoint ──► bind / verify / damaged? ──► plan ──► delta ──► done
                                                           │        └─ part gone, damaged, or not our old bits
                                                           └──► newest anchor that is whole, else the error
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Literal

from torch_delta.errors import (
    BaseMismatch,
    ChainError,
    DigestMismatch,
    FormatError,
    ObjectNotFound,
    TorchDeltaError,
    UnsupportedFormat,
)
from torch_delta.format.chain import LoadAnchor, plan
from torch_delta.format.keys import commit_key
from torch_delta.receive.anchors import load_newest
from torch_delta.receive.base import copy_base
from torch_delta.receive.prepare import prepare
from torch_delta.receive.reports import ApplyReport

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from torch_delta.format.keys import AnchorKey
    from torch_delta.receive.local_checkpoint import LocalCheckpoint
    from torch_delta.receive.session import Session
    from torch_delta.stream import StoredCommit, Stream

logger = logging.getLogger("torch_delta")

Verify = Literal["start", "every", "never"]


class Advance:
    """Takes single steps; used by one thread at a time.

    Args:
        stream: to follow.
        pool: for downloads.
        verify: when to digest every byte at rest before writing: once per process, before each version, or never.
    """

    def __init__(self, stream: Stream, pool: ThreadPoolExecutor, verify: Verify) -> None:
        self._stream = stream
        self._pool = pool
        self._verify = verify

    def owes_proof(self, checkpoint: LocalCheckpoint) -> bool:
        """Whether the bytes at rest were not digested by this process yet, and should be."""
        return self._verify != "never" and not checkpoint._verified

    def step(self, checkpoint: LocalCheckpoint, target: int, timeout_s: float | None) -> ApplyReport | None:
        """Go one step towards `target`.

        Returns:
            What was done, or None if another process had brought the checkpoint to `target` meanwhile.

        Raises:
            TorchDeltaError: as `Follower.apply_to`; the checkpoint is whole and says its version.
        """
        started_s = time.perf_counter()
        with checkpoint.writing(timeout_s=timeout_s, purpose=f"follow {self._stream.store.url}") as session:
            entered_s = time.perf_counter()
            local = self._stand(checkpoint, session)
            verified_s = time.perf_counter()
            if local is not None and local >= target:
                return None
            report = self._go(checkpoint, session, local, target)
        return dataclasses.replace(
            report, wait_s=entered_s - started_s, verify_s=report.verify_s + verified_s - entered_s
        )

    def _stand(self, checkpoint: LocalCheckpoint, session: Session) -> int | None:
        """The proved version of the checkpoint, or None if it has nothing to build on."""
        info, schema = self._stream.load()
        state = session.state
        if state is None:
            return None
        if not state.stream_id:
            session.bind(
                stream_id=info.stream_id,
                commit_sha256=self._stream.info_sha256,
                schema=schema,
                digests=info.base.digests,
            )
            checkpoint._verified = True
            return 0
        if state.stream_id != info.stream_id:
            raise BaseMismatch(
                f"{checkpoint.path} follows stream {state.stream_id} (version {state.version}), "
                f"{self._stream.store.url} is stream {info.stream_id}. Use another folder, or remove this one to start "
                "again",
                path=str(checkpoint.path),
                expected=state.stream_id,
                got=info.stream_id,
            )
        if state.damage:
            return None
        if self._verify == "every" or (self._verify == "start" and not checkpoint._verified):
            try:
                session.verify_full()
            except (DigestMismatch, BaseMismatch, FormatError) as error:  # FormatError: a file is cut off, or gone
                session.mark_damaged(f"found when it was verified: {error}")
                return None
            checkpoint._verified = True
        return state.version

    def _go(self, checkpoint: LocalCheckpoint, session: Session, local: int | None, target: int) -> ApplyReport:
        if local is not None:
            try:
                parent_sha256 = session.bound_state().commit_sha256
                found = self._stream.find_commit(local + 1, parent_sha256=parent_sha256)
                if found is not None:
                    return self._delta(session, found)
            except UnsupportedFormat:
                raise
            except (ObjectNotFound, FormatError, DigestMismatch) as error:
                return self._around(checkpoint, session, target, error)
        try:
            anchor = self._planned_anchor(local, target)
        except ChainError as error:
            if local is not None or checkpoint.base is None:
                raise self._with_way_out(error, local) from error
            # Nothing usable here, no anchor to start from: the base is where every stream starts.
            copy_base(session, checkpoint.base)
            return self._go(checkpoint, session, self._stand(checkpoint, session), target)
        if anchor is None:  # the commit appeared between two looks
            raise ObjectNotFound(f"{commit_key((local or 0) + 1)} was deleted", key=commit_key((local or 0) + 1))
        return self._load_anchor(checkpoint, session, self._anchors(at_most=anchor))

    def _planned_anchor(self, local: int | None, target: int) -> int | None:
        """Version of the anchor from which deltas lead on (rule R3)."""
        first, *_ = plan(
            local_version=local,
            target=target,
            commits_available=self._stream.available(leading_to=target),
            anchors=[anchor.version for anchor in self._stream.anchors()],
        )
        return first.version if isinstance(first, LoadAnchor) else None

    def _delta(self, session: Session, found: StoredCommit) -> ApplyReport:
        state = session.bound_state()
        info, _ = self._stream.load()
        prepared, timings = prepare(session, self._stream.store, found, self._pool, absolute_only=info.absolute_only)
        before_s = time.perf_counter()
        session.apply(prepared)
        return ApplyReport(
            version=prepared.version,
            from_version=state.version,
            kind="delta",
            num_changed=prepared.num_changed,
            stored_bytes=timings.stored_bytes,
            full_bytes=session.weights.size_bytes,
            fetch_s=timings.fetch_s,
            decode_s=timings.decode_s,
            verify_s=0.0,
            apply_s=time.perf_counter() - before_s,
            wait_s=0.0,
        )

    def _around(
        self, checkpoint: LocalCheckpoint, session: Session, target: int, error: TorchDeltaError
    ) -> ApplyReport:
        """A delta cannot be used: find out whether we are the damaged side; go on from an anchor if there is one."""
        state = session.bound_state()
        at_least = state.version + 1
        try:
            if isinstance(error, DigestMismatch):
                session.verify_full()
            elif isinstance(error, FormatError):
                _ = session.weights  # or is it one of our own files?
        except (DigestMismatch, BaseMismatch, FormatError) as ours:
            session.mark_damaged(f"found when version {at_least} did not fit: {ours}")
            return self._go(checkpoint, session, None, target)
        anchors = [anchor for anchor in self._anchors(at_most=target) if anchor.version >= at_least]
        if not anchors:
            if isinstance(error, ObjectNotFound):
                raise ChainError(
                    f"{self._stream.store.url}: version {at_least} cannot be read, {error.message}, and "
                    f"there is no later anchor; this checkpoint stays at version {state.version}. Have the writer "
                    "publish an anchor",
                    local_version=state.version,
                    target=target,
                    missing=at_least,
                ) from error
            raise error
        logger.warning("version %d cannot be used, going on from an anchor: %s", at_least, error)
        return self._load_anchor(checkpoint, session, anchors)

    def _load_anchor(self, checkpoint: LocalCheckpoint, session: Session, anchors: list[AnchorKey]) -> ApplyReport:
        report = load_newest(session, self._stream, anchors, self._pool)
        checkpoint._verified = True
        return report

    def _anchors(self, *, at_most: int) -> list[AnchorKey]:
        """Newest first."""
        return [anchor for anchor in reversed(self._stream.anchors()) if anchor.version <= at_most]

    def _with_way_out(self, error: ChainError, local: int | None) -> ChainError:
        if local is not None:
            return error
        base = self._stream.load()[0].base
        return ChainError(
            f"{error.message}. This stream starts from {base.kind} {base.name!r}: open the checkpoint with base=",
            **{**error.facts, "base": base.name},
        )
