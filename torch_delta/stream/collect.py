"""Retention: deleting what nobody needs, in an order that a crash may cut anywhere (rules A6, K6, L1 to L6).

    claim ──► inventory ──► floor: the older of the newest two complete anchors, or a live reader's version
          ──► commits below it, oldest first, each before its parts ──► older anchors, manifests before files
          ──► orphans: parts and files that nothing names, older than the grace period; expired leases
          ──► what a writer that was killed while it forked left beside the stream (`forks`)

Nobody's training or reading depends on it: what cannot be deleted now is noted in the report and tried the next time.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from torch_delta.config import RetentionConfig
from torch_delta.crashpoints import reach
from torch_delta.errors import ChainError, FormatError, StoreError, TorchDeltaError
from torch_delta.events import RetentionReport
from torch_delta.format.keys import AnchorKey, commit_key
from torch_delta.format.retention import DropVersion, deletable_up_to, plan_deletion
from torch_delta.stream.claim import HeldClaim, take_claim
from torch_delta.stream.forks import drop_fork
from torch_delta.stream.inventory import Inventory, complete_manifest, manifest_key, take_inventory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_delta.store.base import ObjectInfo, Store
    from torch_delta.stream.stream import Stream

logger = logging.getLogger("torch_delta")

_MOST_FAILURES = 20


def collect_garbage(
    stream: Stream,
    config: RetentionConfig | None = None,
    *,
    dry_run: bool = False,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> RetentionReport:
    """Delete what no reader needs. Any process may call this at any time; see `RetentionConfig`.

    Args:
        stream: to clean.
        config: what stays; None for the defaults.
        dry_run: only say what would be deleted. Nothing is written either, so the store is not asked for its time: the
            newest object tells, or this host's clock if it is later. A real run may find a little less, or more.
        on_bytes: told the size of each object as it goes.

    Returns:
        What went and what is left. What could not be deleted is in `failures`; it is tried again the next time.

    Raises:
        ObjectNotFound: there is no stream.
        StoreUnavailable: the store could not be listed, or refused the claim; nothing was deleted.
    """
    chosen = config if config is not None else RetentionConfig()
    started = time.perf_counter()
    info, _ = stream.load()
    claim: HeldClaim | None = None
    if not dry_run:
        taken = take_claim(stream.store, info.stream_id, seconds=chosen.claim_s)
        if isinstance(taken, str):
            return RetentionReport(dry_run=False, holder=taken, seconds=time.perf_counter() - started)
        claim = taken
    try:
        inventory = take_inventory(stream)
        now_s = claim.now_s if claim is not None else max(inventory.newest_s or 0.0, time.time())
        return _Sweep(stream, chosen, inventory, now_s, dry_run=dry_run, on_bytes=on_bytes).run(started)
    finally:
        if claim is not None:
            try:
                claim.release()
            except StoreError as error:
                logger.warning("the claim to delete in %s was not released: %s", stream.store.url, error)


class _Sweep:
    """One pass; every method may be the last one that runs."""

    def __init__(
        self,
        stream: Stream,
        config: RetentionConfig,
        inventory: Inventory,
        now_s: float | None,
        *,
        dry_run: bool,
        on_bytes: Callable[[int], object],
    ) -> None:
        self._stream = stream
        self._config = config
        self._have = inventory
        self._now_s = now_s
        self._dry_run = dry_run
        self._on_bytes = on_bytes
        self._failures: list[str] = []
        self._freed_bytes = 0
        self._gone: set[str] = set()

    def run(self, started: float) -> RetentionReport:
        have = self._have
        live = [lease for lease, item in have.leases if not self._is_older(item, lease.seconds)]
        complete = self._complete_anchors()
        up_to = deletable_up_to(
            (version for version, _ in complete),
            (lease.version for lease in live),
            keep_anchors=self._config.keep_anchors,
        )
        steps = (
            ()
            if up_to is None
            else plan_deletion(up_to=up_to, commits=have.commits, anchors=(version for version, _ in complete))
        )
        floor = max((version for version, _ in complete if up_to is not None and version <= up_to), default=0)
        versions = self._drop_versions([step.version for step in steps if isinstance(step, DropVersion)])
        leased = {lease.anchor for lease in live}
        anchors = self._drop_anchors(
            [anchor for anchor in have.anchors if anchor[0] < floor and manifest_key(anchor) not in leased]
        )
        num_orphans = self._drop_orphans(floor)
        num_leases = sum(
            self._delete(item.key, item.size_bytes)
            for item in [
                *(item for lease, item in have.leases if self._is_older(item, lease.seconds)),
                *(item for item in have.dead_leases if self._is_older(item, self._config.grace_s)),
            ]
        )
        forks = self._drop_forks()
        num_temporary = self._sweep_temporary(self._stream.store)
        kept = {item.key: item.size_bytes for item in have.objects() if item.key not in self._gone}
        return RetentionReport(
            dry_run=self._dry_run,
            floor=None if up_to is None else floor,
            versions=tuple(versions),
            anchors=tuple(sorted(version for version, _ in anchors)),
            num_orphans=num_orphans,
            num_expired_leases=num_leases,
            forks=tuple(forks),
            num_live_leases=len(live),
            num_temporary=num_temporary,
            freed_bytes=self._freed_bytes,
            kept_bytes=sum(kept.values()),
            budget_bytes=self._config.budget_bytes,
            failures=tuple(self._failures),
            seconds=time.perf_counter() - started,
        )

    def _complete_anchors(self) -> list[tuple[int, str]]:
        """The newest complete ones, as many versions as are kept; older ones are not looked at."""
        found: list[tuple[int, str]] = []
        for anchor, files in sorted(self._have.anchors.items(), reverse=True):
            if len({version for version, _ in found}) >= self._config.keep_anchors and found[-1][0] != anchor[0]:
                if files.manifest is not None:
                    found.append(anchor)  # a lease may need to go back to it; that it is whole matters to nobody else
                continue
            if complete_manifest(self._stream, AnchorKey(version=anchor[0], nonce=anchor[1]), files) is not None:
                found.append(anchor)
        return found

    def _drop_versions(self, versions: Iterable[int]) -> list[int]:
        """Oldest first; the first one that cannot be deleted ends it, so that what stays has no hole."""
        done = []
        for version in versions:
            if not self._delete(commit_key(version), 0):
                break
            reach("gc.commit_deleted")
            for item in self._have.parts.get(version, ()):
                self._delete(item.key, item.size_bytes)
                reach("gc.part_deleted")
            done.append(version)
        return done

    def _drop_anchors(self, anchors: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        done = []
        for anchor in anchors:
            found = self._have.anchors[anchor]
            if found.manifest is None:
                continue  # an orphan, which has its own rule
            if not self._delete(found.manifest.key, found.manifest.size_bytes):
                continue
            reach("gc.manifest_deleted")
            for item in found.files.values():
                self._delete(item.key, item.size_bytes)
                reach("gc.file_deleted")
            done.append(anchor)
        return done

    def _drop_orphans(self, floor: int) -> int:
        orphans = [*self._orphaned_parts(floor), *self._orphaned_files()]
        num = 0
        for item in orphans:
            num += self._delete(item.key, item.size_bytes)
            reach("gc.orphan_deleted")
        return num

    def _orphaned_parts(self, floor: int) -> Iterable[ObjectInfo]:
        commits = set(self._have.commits)
        for version, parts in self._have.parts.items():
            left = [item for item in parts if item.key not in self._gone]
            if version not in commits and version < floor:
                yield from left  # a deletion that was cut short: no commit can come any more (rule L5)
                continue
            old = [item for item in left if self._is_older(item, self._config.grace_s)]
            if old and version in commits:
                named = self._named_parts(version)
                old = [] if named is None else [item for item in old if item.key not in named]
            yield from old

    def _named_parts(self, version: int) -> set[str] | None:
        """None where the commit cannot be read: then nothing of the version is touched."""
        try:
            return {part.key for part in self._stream.commit(version).commit.parts}
        except (ChainError, FormatError, StoreError) as error:
            self._fail(f"parts of version {version} were not looked at: {error}")
            return None

    def _orphaned_files(self) -> Iterable[ObjectInfo]:
        for (version, nonce), found in self._have.anchors.items():
            old = [
                item
                for item in found.files.values()
                if item.key not in self._gone and self._is_older(item, self._config.grace_s)
            ]
            if not old:
                continue
            named: set[str] = set()
            if found.manifest is not None and found.manifest.key not in self._gone:
                try:
                    named = {file.key for file in self._stream.anchor(AnchorKey(version=version, nonce=nonce)).files}
                except (FormatError, StoreError) as error:
                    self._fail(f"files of the anchor {found.manifest.key} were not looked at: {error}")
                    continue
            yield from (item for item in old if item.key not in named)

    def _drop_forks(self) -> list[str]:
        """Roots of the unfinished ones that went (rule L6)."""
        done = []
        for note, item in self._have.forks:
            try:
                if drop_fork(
                    self._stream, note, item, is_old=self._is_old, delete=self._delete, sweep=self._sweep_temporary
                ):
                    done.append(note.root)
            except TorchDeltaError as error:
                self._fail(f"the fork at {note.root} was not looked at: {error}")
        for item in self._have.dead_forks:
            if self._is_old(item):
                self._delete(item.key, item.size_bytes)
        return done

    def _is_old(self, item: ObjectInfo) -> bool:
        return self._is_older(item, self._config.grace_s)

    def _sweep_temporary(self, store: Store) -> int:
        if self._dry_run:
            return 0
        try:
            return store.sweep_temporary(older_than_s=self._config.grace_s)
        except StoreError as error:
            self._fail(str(error))
            return 0

    def _is_older(self, item: ObjectInfo, seconds: float) -> bool:
        """By the store's clock alone (rule L3)."""
        return item.modified_s is not None and self._now_s is not None and self._now_s - item.modified_s > seconds

    def _delete(self, key: str, size_bytes: int, beside: Store | None = None) -> bool:
        if not self._dry_run:
            try:
                (self._stream.store if beside is None else beside).delete(key)
            except StoreError as error:
                self._fail(f"{key}: {error}")
                return False
        if beside is None:
            self._gone.add(key)
        self._freed_bytes += size_bytes
        self._on_bytes(size_bytes)
        return True

    def _fail(self, message: str) -> None:
        logger.warning("retention in %s: %s", self._stream.store.url, message)
        if len(self._failures) < _MOST_FAILURES:
            self._failures.append(message)
