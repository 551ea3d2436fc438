"""Planning: which anchor to load and which deltas to apply to get from one version to another. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import ChainError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.format.commit import Commit


@dataclass(frozen=True, slots=True)
class LoadAnchor:
    """Replace the state by the anchor of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class ApplyDelta:
    """Turn version - 1 into `version` by the parts of its commit."""

    version: int


Step = LoadAnchor | ApplyDelta


def plan(
    *,
    local_version: int | None,
    target: int,
    commits_available: tuple[int, int] | None,
    anchors: Sequence[int],
) -> tuple[Step, ...]:
    """The shortest sequence of steps to `target` that exists.

    Deltas from where the receiver stands are preferred; where retention removed one of them, or where the receiver has
    nothing or is ahead, the newest anchor from which deltas lead on is loaded first.

    Args:
        local_version: the version the receiver has; 0 if it has the base; None if it has nothing.
        target: the version wanted.
        commits_available: first and last version whose commits can be read (they are contiguous), or None.
        anchors: versions that have an anchor, in any order.

    Returns:
        The steps, empty if the receiver is there already.

    Raises:
        ChainError: a gap: no path leads there. Facts: local_version, target, missing (the first version without
            a commit, or 0 if there is nothing to start from).
    """
    if target < 0:
        raise ChainError(f"version {target} does not exist", local_version=local_version, target=target, missing=target)
    if local_version == target:
        return ()
    first, last = commits_available if commits_available is not None else (1, 0)

    def deltas(start: int) -> tuple[Step, ...] | None:
        if start > target or (start < target and (start + 1 < first or target > last)):
            return None
        return tuple(ApplyDelta(version) for version in range(start + 1, target + 1))

    if local_version is not None and (steps := deltas(local_version)) is not None:
        return steps
    for anchor in sorted(set(anchors), reverse=True):
        if anchor >= 0 and (steps := deltas(anchor)) is not None:
            return (LoadAnchor(anchor), *steps)
    missing = _first_missing(local_version, target, first, last)
    have = "nothing" if local_version is None else f"version {local_version}"
    readable = "no commits" if last < first else f"commits {first} to {last}"
    known = ", ".join(str(anchor) for anchor in sorted(set(anchors))) or "none"
    raise ChainError(
        f"no path to version {target}: this receiver has {have}, the stream has {readable} and anchors at: {known}. "
        f"Start again from a copy of the base, or have the writer publish an anchor",
        local_version=local_version,
        target=target,
        missing=missing,
    )


def _first_missing(local_version: int | None, target: int, first: int, last: int) -> int:
    start = 0 if local_version is None or local_version > target else local_version
    if start + 1 < first or last < first:
        return start + 1
    return last + 1 if target > last else start


def check_parent(commit: Commit, parent_sha256: str) -> None:
    """Check that `commit` continues the history the reader holds (rule C2).

    Args:
        commit: of version v.
        parent_sha256: of the stored bytes of the commit of v - 1 that the reader holds, or of ``stream.json``.

    Raises:
        ChainError: a fork: this commit was made from another version than the reader's. Facts: version, expected, got.
    """
    if commit.parent_sha256 != parent_sha256:
        raise ChainError(
            f"{commit.key}: forks from another history: it follows {commit.parent_sha256}, this side holds "
            f"{parent_sha256} for version {commit.version - 1}. Start again from an anchor or the base (rule C2)",
            rule="C2",
            key=commit.key,
            version=commit.version,
            expected=parent_sha256,
            got=commit.parent_sha256,
        )
