"""Planning a way through commits and anchors, and what may be deleted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.errors import ChainError
from torch_delta.format import ApplyDelta, LoadAnchor, plan
from torch_delta.format.retention import DropAnchors, DropVersion, deletable_up_to, plan_deletion


def text(steps) -> str:
    return " ".join(f"{'A' if isinstance(step, LoadAnchor) else '+'}{step.version}" for step in steps)


@pytest.mark.parametrize(
    ("local", "target", "commits", "anchors", "expected"),
    [
        (0, 0, None, [], ""),
        (3, 3, None, [], ""),
        (0, 3, (1, 3), [], "+1 +2 +3"),
        (2, 3, (1, 3), [], "+3"),
        (2, 3, (3, 5), [4], "+3"),
        (0, 5, (4, 9), [3, 5], "A5"),
        (0, 6, (4, 9), [3, 5], "A5 +6"),
        (0, 4, (4, 9), [3, 5], "A3 +4"),
        (2, 5, (4, 9), [3], "A3 +4 +5"),
        (None, 2, (1, 2), [0], "A0 +1 +2"),
        (None, 0, None, [0], "A0"),
        (None, 7, None, [7], "A7"),
        (9, 4, (1, 9), [0, 3], "A3 +4"),
        (0, 6, (1, 9), [5], "+1 +2 +3 +4 +5 +6"),
    ],
)
def test_plans(local, target, commits, anchors, expected) -> None:  # rule R3
    assert text(plan(local_version=local, target=target, commits_available=commits, anchors=anchors)) == expected


@pytest.mark.parametrize(
    ("local", "target", "commits", "anchors", "missing"),
    [
        (0, 5, (4, 9), [], 1),
        (0, 3, (4, 9), [4], 1),
        (2, 9, (4, 9), [2], 3),
        (0, 6, (1, 5), [], 6),
        (None, 3, (1, 5), [], 0),
        (0, 1, None, [], 1),
        (5, 2, (1, 5), [3], 0),
        (0, -1, (1, 5), [0], -1),
    ],
)
def test_gaps(local, target, commits, anchors, missing) -> None:  # rule R3
    with pytest.raises(ChainError) as caught:
        plan(local_version=local, target=target, commits_available=commits, anchors=anchors)
    assert (caught.value.local_version, caught.value.target) == (local, target)
    assert caught.value.action == "resync"
    assert caught.value.missing == missing


@given(
    st.none() | st.integers(0, 12),
    st.integers(0, 12),
    st.none() | st.tuples(st.integers(1, 12), st.integers(0, 12)),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_every_plan_arrives_and_a_gap_is_real(local, target, commits, anchors) -> None:
    first, last = commits or (1, 0)
    # Oracle: versions reachable by one step at a time.
    reachable = {*anchors} | (set() if local is None else {local})
    for version in range(1, 13):
        if version - 1 in reachable and first <= version <= last:
            reachable.add(version)
    try:
        steps = plan(local_version=local, target=target, commits_available=commits, anchors=anchors)
    except ChainError:
        assert target not in reachable
        return
    at = local
    for step in steps:
        if isinstance(step, ApplyDelta):
            assert at == step.version - 1
            assert first <= step.version <= last
        else:
            assert step.version in anchors
        at = step.version
    assert at == target


@pytest.mark.parametrize(
    ("up_to", "commits", "anchors", "expected"),
    [
        (9, range(1, 10), [], []),
        (2, range(1, 10), [3], []),
        (3, range(1, 10), [3], [DropVersion(1), DropVersion(2)]),
        (5, [3, 2, 4], [3, 0, 7], [DropVersion(2), DropAnchors(0)]),
        (9, [], [1, 5, 5, 3], [DropAnchors(1), DropAnchors(3)]),
    ],
)
def test_deletion_order(up_to, commits, anchors, expected) -> None:  # rule A6, rule K6
    assert list(plan_deletion(up_to=up_to, commits=commits, anchors=anchors)) == expected


@pytest.mark.parametrize(
    ("complete", "leases", "keep", "expected"),
    [
        ([], [], 2, None),
        ([7], [], 2, None),
        ([7, 7], [], 2, None),
        ([0, 7], [], 2, 0),
        ([3, 9, 6, 6], [], 2, 6),
        ([3, 9, 6], [5], 2, 5),
        ([3, 9, 6], [50, 8], 2, 6),
        ([3, 9, 6], [], 3, 3),
    ],
)
def test_what_the_newest_anchors_and_live_readers_need_stays(complete, leases, keep, expected) -> None:
    # rules L1 and L2
    assert deletable_up_to(complete, leases, keep_anchors=keep) == expected


@given(st.integers(1, 12), st.integers(0, 12), st.sets(st.integers(0, 12)))
def test_deletion_never_cuts_off_what_stays(last, up_to, anchors) -> None:  # rule A6
    anchors = {anchor for anchor in anchors if anchor <= last}
    commits = set(range(1, last + 1))
    for step in plan_deletion(up_to=up_to, commits=commits, anchors=anchors):
        (commits if isinstance(step, DropVersion) else anchors).discard(step.version)
        available = (min(commits), last) if commits else None
        # After every single step a newcomer still reaches the newest version.
        plan(local_version=None, target=last, commits_available=available, anchors=sorted(anchors))
        assert anchors
