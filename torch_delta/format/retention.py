"""What may be deleted, and in which order, so that every version that stays can still be reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class DropVersion:
    """Delete the commit of `version`, then everything under its parts prefix."""

    version: int


@dataclass(frozen=True, slots=True)
class DropAnchors:
    """Delete every anchor of `version`: each manifest, then its files."""

    version: int


def deletable_up_to(complete: Iterable[int], leases: Iterable[int], *, keep_anchors: int = 2) -> int | None:
    """The version up to which space may be freed (rules L1 and L2).

    Args:
        complete: versions of the complete anchors, each once or more often.
        leases: versions that live readers stand at.
        keep_anchors: how many of the newest anchors stay, with all that follows them; at least 2.

    Returns:
        The `up_to` of `plan_deletion`, or None if there are too few anchors.
    """
    newest = sorted(set(complete), reverse=True)[:keep_anchors]
    if len(newest) < keep_anchors:
        return None
    return min([newest[-1], *leases])


def plan_deletion(
    *,
    up_to: int,
    commits: Iterable[int],
    anchors: Iterable[int],
) -> tuple[DropVersion | DropAnchors, ...]:
    """Steps that free what lies below the newest anchor at or below a version (rules K6 and A6).

    Args:
        up_to: nothing newer than this is touched.
        commits: versions whose commit exists.
        anchors: versions that have a complete anchor.

    Returns:
        Steps in the order in which they must be done; a crash between two leaves a stream that is still readable.
        Empty if no anchor would be left to start from.
    """
    kept = max((anchor for anchor in anchors if anchor <= up_to), default=None)
    if kept is None:
        return ()
    versions = sorted(version for version in set(commits) if version < kept)
    older = sorted(anchor for anchor in set(anchors) if anchor < kept)
    return (*map(DropVersion, versions), *map(DropAnchors, older))
