"""Which absolute patches stay: the redo log since the last sync, and what live consumers have not applied."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from torch_delta.receive.consumers import oldest_needed

if TYPE_CHECKING:
    from pathlib import Path

    from torch_delta.receive.state import Layout

logger = logging.getLogger("torch_delta")

_SYNC_AFTER_BYTES = 256 << 20
_SYNC_AFTER_PATCHES = 64


def kept_patches(layout: Layout) -> dict[int, int]:
    """Version to size in bytes of every patch on disk, ascending."""
    found = {}
    with os.scandir(layout.patches) as entries:
        for entry in entries:
            stem, _, suffix = entry.name.partition(".")
            if suffix == "safetensors" and stem.isdecimal():
                found[int(stem)] = entry.stat().st_size
    return dict(sorted(found.items()))


def redo_log_is_long(kept: dict[int, int], synced_version: int) -> bool:
    """Whether replaying the patches since the last sync would cost more than syncing the weights now does."""
    sizes = [size for version, size in kept.items() if version > synced_version]
    return len(sizes) > _SYNC_AFTER_PATCHES or sum(sizes) > _SYNC_AFTER_BYTES


def prune(layout: Layout, kept: dict[int, int], *, version: int, synced_version: int, budget_bytes: int) -> None:
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
    for number in sorted(kept, reverse=True):
        pinned_only = floor < number <= synced_version
        total += kept[number] if pinned_only else 0
        if number <= floor or number > version or (pinned_only and total > budget_bytes):
            if pinned_only:
                logger.warning("%s: patch %d dropped before every consumer had it; they reload", layout.root, number)
            _remove(layout.patch(number))


def drop_patches_above(layout: Layout, version: int) -> None:
    """Remove patches of versions that were prepared and never begun; the caller holds the writer lock."""
    for number in kept_patches(layout):
        if number > version:
            _remove(layout.patch(number))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)  # costs space, not correctness; tried again next time
