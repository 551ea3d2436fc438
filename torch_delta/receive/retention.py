"""Which absolute patches stay: the redo log since the last sync, and what live consumers have not applied."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from torch_delta.errors import FormatError
from torch_delta.receive.consumers import oldest_needed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch_delta.receive.state import Layout

logger = logging.getLogger("torch_delta")

_SYNC_AFTER_BYTES = 256 << 20
_SYNC_AFTER_PATCHES = 64
_NAME = re.compile(r"([0-9]{20})(?:-([0-9]{20}))?\.safetensors")


class KeptPatch(NamedTuple):
    """A patch on disk.

    Attributes:
        version: it leads to.
        since: it leads from.
        size_bytes: of the file.
    """

    version: int
    since: int
    size_bytes: int


def kept_patches(layout: Layout) -> list[KeptPatch]:
    """Every patch on disk, ascending by version."""
    found = []
    with os.scandir(layout.patches) as entries:
        for entry in entries:
            if (named := _NAME.fullmatch(entry.name)) is not None:
                version, since = int(named[1]), named[2]
                found.append(KeptPatch(version, version - 1 if since is None else int(since), entry.stat().st_size))
    return sorted(found)


def way(kept: Sequence[KeptPatch], since: int, version: int) -> list[KeptPatch] | None:
    """The patches that lead from one version to another, in order; None if those on disk do not."""
    found = []
    at = version
    for patch in reversed(kept):
        if patch.version == at and at > since:
            found.append(patch)
            at = patch.since
    return found[::-1] if at == since else None


def redo_log(layout: Layout, synced_version: int, version: int) -> list[KeptPatch]:
    """The patches to write again after a power cut.

    Raises:
        FormatError: one is gone.
    """
    found = way(kept_patches(layout), synced_version, version)
    if found is None:
        raise FormatError(
            f"{layout.patches}: no patches lead from version {synced_version} to {version}: one is gone", key="patches"
        )
    return found


def redo_log_is_long(kept: Sequence[KeptPatch], synced_version: int) -> bool:
    """Whether replaying the patches since the last sync would cost more than syncing the weights now does."""
    sizes = [patch.size_bytes for patch in kept if patch.version > synced_version]
    return len(sizes) > _SYNC_AFTER_PATCHES or sum(sizes) > _SYNC_AFTER_BYTES


def prune(layout: Layout, kept: Sequence[KeptPatch], *, version: int, synced_version: int, budget_bytes: int) -> None:
    """Remove patches nobody needs; the caller holds the writer lock.

    Args:
        layout: of the checkpoint.
        kept: what `kept_patches` found.
        version: the checkpoint is at; patches above it were never applied.
        synced_version: patches up to it are no longer part of the redo log.
        budget_bytes: most that patches kept for consumers alone may take. Beyond it the oldest go, and a consumer that
            comes for one later reloads from the checkpoint, which is cheaper by then.
    """
    needed = oldest_needed(layout.consumers)
    floor = synced_version if needed is None else min(synced_version, needed)
    total = 0
    for patch in sorted(kept, reverse=True):
        pinned_only = floor < patch.version <= synced_version
        total += patch.size_bytes if pinned_only else 0
        if patch.version <= floor or patch.version > version or (pinned_only and total > budget_bytes):
            if pinned_only:
                logger.warning(
                    "%s: patch %d dropped before every consumer had it; they reload", layout.root, patch.version
                )
            _remove(layout.patch(patch.version, patch.since))


def drop_patches_above(layout: Layout, version: int) -> None:
    """Remove patches of versions that were prepared and never begun; the caller holds the writer lock."""
    for patch in kept_patches(layout):
        if patch.version > version:
            _remove(layout.patch(patch.version, patch.since))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)  # costs space, not correctness; tried again next time
