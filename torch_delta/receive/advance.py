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
from torch_delta.format.chain import LoadAnchor, check_parent, plan
from torch_delta.format.keys import anchor_key, commit_key
from torch_delta.receive.anchors import load_newest
from torch_delta.receive.base import copy_base
from torch_delta.receive.consumers import oldest_needed
from torch_delta.receive.merge import prepare_merged
from torch_delta.receive.prepare import prepare
from torch_delta.receive.reports import ApplyReport
from torch_delta.receive.workers import run_all
from torch_delta.stream.lineages import continues_from

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

    from torch_delta.format.keys import AnchorKey
    from torch_delta.receive.local_checkpoint import LocalCheckpoint
    from torch_delta.receive.session import Session
    from torch_delta.stream import StoredCommit, Stream

logger = logging.getLogger("torch_delta")

Verify = Literal["start", "every", "never"]

_MOST_MERGED = 512  # commits are read ahead, and one of many ranks takes a megabyte


class Advance:
    """Takes single steps; used by one thread at a time.

    Args:
        stream: to follow.
        pool: for downloads.
        verify: when to digest every byte at rest before writing: once per process, before each version, or never.
        merge_from: fewest pending versions that are taken in one step; None for one version per step.
        hold: told, before anything is read, the version that reading starts from and the key of the anchor that is
            read, if any: where the reader's lease is written.
    """

    def __init__(
        self,
        stream: Stream,
        pool: ThreadPoolExecutor,
        verify: Verify,
        *,
        merge_from: int | None = None,
        hold: Callable[[int, str | None], None] = lambda _version, _anchor: None,
    ) -> None:
        self._stream = stream
        self._pool = pool
        self._verify = verify
        self._merge_from = merge_from
        self._hold = hold
        self._singly_until = 0  # a run up to this version could not be merged

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
            self._hold(local, None)
            try:
                parent_sha256 = session.bound_state().commit_sha256
                found = self._stream.find_commit(local + 1, parent_sha256=parent_sha256)
                if found is not None:
                    return self._deltas(session, self._run(session, found, target), target)
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

    def _run(self, session: Session, first: StoredCommit, target: int) -> list[StoredCommit]:
        """The commits to take in one step, beginning with `first`: as many as there are, or this one alone."""
        start = first.commit.version
        last = min(target, start + _MOST_MERGED - 1)
        if self._merge_from is None or last - start + 1 < self._merge_from or start <= self._singly_until:
            return [first]
        if oldest_needed(session.layout.consumers) is not None:
            return [first]  # an engine of this host may want to stop at any of them
        run = [first]
        for found in run_all(self._pool, self._stream.find_commit, range(start + 1, last + 1)):
            if found is None:
                break
            check_parent(found.commit, run[-1].sha256)
            run.append(found)
        return run

    def _deltas(self, session: Session, run: list[StoredCommit], target: int) -> ApplyReport:
        """Take a run of versions by their deltas, or by an anchor if that is fewer bytes."""
        if len(run) == 1:
            return self._delta(session, run)
        shortcut = self._cheaper_anchors(session, run, target)
        try:
            return self._load(session, shortcut) if shortcut else self._delta(session, run)
        except UnsupportedFormat:
            raise
        except (ObjectNotFound, FormatError, DigestMismatch) as error:
            # One bad version among them must not cost the others; alone it is dealt with as ever.
            logger.warning("versions up to %d are taken one by one: %s", run[-1].commit.version, error)
            self._singly_until = run[-1].commit.version
            return self._delta(session, run[:1])

    def _cheaper_anchors(self, session: Session, run: list[StoredCommit], target: int) -> list[AnchorKey]:
        """Anchors that lead further with fewer bytes than the deltas of `run`; empty if there is none."""
        sizes = {found.commit.version: sum(part.stored_bytes for part in found.commit.parts) for found in run}
        if sum(sizes.values()) <= session.weights.size_bytes:
            return []
        for anchor in self._anchors(at_most=target):
            if anchor.version <= run[0].commit.version:
                break
            try:
                size = sum(file.stored_bytes for file in self._stream.anchor(anchor).files)
            except (ObjectNotFound, FormatError):
                continue
            if size + sum(at for version, at in sizes.items() if version > anchor.version) < sum(sizes.values()):
                return [anchor]
        return []

    def _delta(self, session: Session, run: list[StoredCommit]) -> ApplyReport:
        state = session.bound_state()
        info, _ = self._stream.load()
        store, absolute_only = self._stream.store, info.absolute_only
        if len(run) == 1:
            prepared, timings = prepare(session, store, run[0], self._pool, absolute_only=absolute_only)
        else:
            prepared, timings = prepare_merged(session, store, run, self._pool, absolute_only=absolute_only)
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
            stream_id=info.stream_id,
        )

    def change_over(
        self, checkpoint: LocalCheckpoint, before: str, version: int, timeout_s: float | None
    ) -> ApplyReport | None:
        """Bring a checkpoint of a stream that ended to the one that continues it, which this object reads.

        Args:
            checkpoint: of this host.
            before: id of the stream that ended.
            version: at which this one forks from it.
            timeout_s: for another process.

        Returns:
            What was done; None where nothing had to be: another process did it, or the checkpoint follows no stream.

        Raises:
            ChainError: the checkpoint is at another version, and there is no anchor to start from.
        """
        info, schema = self._stream.load()
        started_s = time.perf_counter()
        with checkpoint.writing(timeout_s=timeout_s, purpose=f"follow {self._stream.store.url}") as session:
            entered_s = time.perf_counter()
            state = session.state
            if state is None or state.stream_id != before:
                return None
            here = (state.version, state.schema_id, state.digests) == (version, schema.id, info.base.digests)
            if not here or state.damage or not continues_from(self._stream, before, version):
                anchors = self._anchors(at_most=self._stream.head())
                if not anchors:
                    raise ChainError(
                        f"{checkpoint.path} is at version {state.version} of stream {before}, which "
                        f"{self._stream.store.url} continues from version {version}, and there is no anchor yet; it "
                        "stays where it is. Try again, or have the writer publish an anchor",
                        local_version=state.version,
                        target=version,
                    )
                report = self._load_anchor(checkpoint, session, anchors)
                return dataclasses.replace(report, wait_s=entered_s - started_s)
            session.rebind(stream_id=info.stream_id, commit_sha256=self._stream.info_sha256)
            return ApplyReport(
                version=0,
                from_version=state.version,
                kind="successor",
                num_changed=0,
                stored_bytes=0,
                full_bytes=session.weights.size_bytes,
                fetch_s=0.0,
                decode_s=0.0,
                verify_s=0.0,
                apply_s=time.perf_counter() - entered_s,
                wait_s=entered_s - started_s,
                stream_id=info.stream_id,
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
                    # Whoever deletes takes the commit first (rule K6): then a store may just show its parts late.
                    is_committed=self._stream.find_commit(at_least) is not None,
                ) from error
            raise error
        logger.warning("version %d cannot be used, going on from an anchor: %s", at_least, error)
        return self._load_anchor(checkpoint, session, anchors)

    def _load_anchor(self, checkpoint: LocalCheckpoint, session: Session, anchors: list[AnchorKey]) -> ApplyReport:
        report = self._load(session, anchors)
        checkpoint._verified = True
        return report

    def _load(self, session: Session, anchors: list[AnchorKey]) -> ApplyReport:
        newest = anchors[0]
        self._hold(newest.version, anchor_key(newest.version, newest.nonce))
        return load_newest(session, self._stream, anchors, self._pool)

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
