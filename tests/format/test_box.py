"""Boxes against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.format import Box, TensorSpec, check_disjoint, covers, find_overlap


@st.composite
def tensors_and_boxes(draw, num_boxes: int = 1) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    boxes = []
    for _ in range(draw(st.integers(1, num_boxes))):
        offset = tuple(draw(st.integers(0, full - 1)) for full in shape)
        extent = tuple(draw(st.integers(0, full - at)) for full, at in zip(shape, offset, strict=True))
        boxes.append(Box(offset, extent))
    return shape, boxes


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    found = np.zeros(shape, dtype=np.int64)
    found[tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))] = 1
    return found


@given(tensors_and_boxes())
def test_runs_are_the_box_and_maximal(drawn) -> None:
    shape, (box,) = drawn
    flat = np.flatnonzero(mask(shape, box))
    found, expected_local, previous_end = [], 0, None
    for start, local, length in box.runs(shape):
        assert length > 0
        assert local == expected_local
        assert previous_end is None or start > previous_end  # a run that touches the one before it should be one run
        found += range(start, start + length)
        expected_local, previous_end = local + length, start + length
    assert found == flat.tolist()
    assert box.numel == len(flat)
    assert box.fits(shape)


def test_runs_by_hand() -> None:
    assert list(Box((), ()).runs(())) == [(0, 0, 1)]
    assert list(Box.whole((4, 2)).runs((4, 2))) == [(0, 0, 8)]
    assert list(Box((1, 0), (2, 2)).runs((4, 2))) == [(2, 0, 4)]
    assert list(Box((1, 1), (2, 1)).runs((4, 2))) == [(3, 0, 1), (5, 1, 1)]
    assert list(Box((0, 1, 0), (2, 2, 4)).runs((2, 3, 4))) == [(4, 0, 8), (16, 8, 8)]
    assert list(Box((0, 0), (0, 2)).runs((4, 2))) == []
    big = 2**40
    assert list(Box((big, 0), (1, 4)).runs((2 * big, 4))) == [(4 * big, 0, 4)]
    with pytest.raises(ValueError, match="does not fit"):
        list(Box((3, 0), (2, 2)).runs((4, 2)))


def test_shape_questions() -> None:
    spec = TensorSpec("w", "BF16", (4, 2))
    assert Box.whole((4, 2)).is_whole(spec)
    assert not Box((0, 0), (4, 1)).is_whole(spec)
    assert not Box((1, 0), (3, 2)).fits((3, 2))
    assert not Box((-1,), (1,)).fits((3,))
    assert not Box((0,), (-1,)).fits((3,))
    assert not Box((0,), (1,)).fits((3, 1))
    with pytest.raises(ValueError, match="one offset and one extent"):
        Box((0,), (1, 2))


@given(tensors_and_boxes(num_boxes=8))
def test_overlap_and_coverage(drawn) -> None:
    shape, boxes = drawn
    total = sum((mask(shape, box) for box in boxes), np.zeros(shape, dtype=np.int64))
    pair = find_overlap(boxes)
    assert (pair is not None) == bool((total > 1).any())
    if pair is not None:
        first, second = pair
        assert first < second
        assert (mask(shape, boxes[first]) & mask(shape, boxes[second])).any()
        assert boxes[first].overlaps(boxes[second])
    assert covers(boxes, shape) == bool((total == 1).all())


def pinwheel(n: int) -> list[Box]:
    """Four boxes around a hole: no hyperplane separates them."""
    return [Box((0, 0), (1, n - 1)), Box((0, n - 1), (n - 1, 1)), Box((n - 1, 1), (1, n - 1)), Box((1, 0), (n - 1, 1))]


def test_boxes_that_no_plane_separates() -> None:
    assert find_overlap(pinwheel(5)) is None
    assert covers([*pinwheel(5), Box((1, 1), (3, 3))], (5, 5))
    assert find_overlap([*pinwheel(5), Box((1, 1), (3, 4))]) == (1, 4)


def test_large_meshes_are_checked_fast() -> None:
    grid = [Box((row, column), (1, 1)) for row in range(150) for column in range(150)]
    assert find_overlap(grid) is None
    assert find_overlap([*grid, Box((70, 70), (1, 2))]) is not None


def test_entangled_boxes_are_refused_not_compared_for_ever(refuses) -> None:  # rule P1
    # A staircase peels one box per split, which would take quadratic time.
    stairs = [
        Box((at, at + 1), (20_000 - at, 1)) if at % 2 else Box((at, at), (1, 20_000 - at)) for at in range(10_000)
    ]
    with refuses("P1", match="too entangled"):
        find_overlap(stairs)


def test_overlap_names_the_tensor(refuses) -> None:  # rule P1
    check_disjoint([Box((0,), (2,)), Box((2,), (2,))], name="w")
    with refuses("P1", match="w: two boxes overlap"):
        check_disjoint([Box((0,), (3,)), Box((2,), (2,))], name="w")
