"""Changes and the geometry under them, against one coordinate tuple at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.oracle import digest, flat_positions, random_bits, schema_of
from torch_delta.codec.bits import blocks, gather
from torch_delta.codec.change import Change
from torch_delta.codec.geometry import Layout
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO
from torch_delta.format.schema import Schema, TensorSpec


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, tuple[int, ...]]:
    full = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in full)
    shape = tuple(draw(st.integers(1, extent - at)) for at, extent in zip(offset, full, strict=True))
    return Box(offset, shape), full


@given(boxes())
def test_layout_equals_coordinates(where: tuple[Box, tuple[int, ...]]) -> None:
    box, full = where
    layout = Layout.of(box, full)
    expected = flat_positions(box, full)
    assert layout.flat_index(np.arange(box.numel)).tolist() == expected
    spelled_out = [
        start + row * stride + column
        for start, num_rows, length, stride in layout.rows()
        for row in range(num_rows)
        for column in range(length)
    ]
    assert spelled_out == expected
    runs = [start + at for start, _, length in box.runs(full) for at in range(length)]
    assert runs == expected


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**32 + 1])
def test_layout_of_huge_boxes(numel: int) -> None:
    columns = Layout.of(Box((0, 1), (numel, 2)), (numel, 3))
    last = columns.flat_index(np.array([2 * numel - 1]))
    assert last.tolist() == [3 * numel - 1]
    whole = Layout.of(Box((5,), (numel,)), (numel + 5,))
    assert whole.flat_index(np.array([numel - 1], np.uint64 if numel < 2**31 else np.int64)).tolist() == [numel + 4]
    assert whole.steps == ((1, numel),)


def test_layout_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="empty or outside"):
        Layout.of(Box((1,), (3,)), (3,))
    with pytest.raises(ValueError, match="empty or outside"):
        Layout.of(Box((1,), (0,)), (3,))


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), limit=st.integers(1, 40))
def test_blocks_follow_each_other(shape: list[int], limit: int) -> None:
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    pieces = [array[where].reshape(-1) for where in blocks(shape, limit)]
    assert all(piece.size <= limit for piece in pieces)
    assert [int(i) for piece in pieces for i in piece] == list(range(array.size))


def test_gather_from_a_strided_view_beyond_4_gi_elements() -> None:
    # One element repeated 2**33 times: no memory behind it.
    huge = np.broadcast_to(np.array([[1], [7]], np.uint16), (2, 2**33))
    assert gather(huge, np.array([0, 2**33 - 1, 2**33, 2**34 - 1])).tolist() == [1, 1, 7, 7]


def test_increment_of_a_change() -> None:
    schema = schema_of(("BF16", (6, 8)))
    rng = np.random.default_rng(0)
    box = Box((1, 2), (4, 3))
    positions = flat_positions(box, (6, 8))
    old, new = random_bits(rng, (3,), 2), random_bits(rng, (3,), 2)
    change = Change(tensor=0, box=box, index=np.array([0, 5, 11], np.uint32), old=old, new=new)
    at = [positions[i] for i in (0, 5, 11)]
    expected = digest(dict(zip(at, new.tolist(), strict=True)), 2) - digest(dict(zip(at, old.tolist(), strict=True)), 2)
    assert change.flat_index(schema).tolist() == at
    assert change.computed_increment(schema) == expected
    assert change.with_increment(expected).increment == expected
    assert (change.count, change.whole) == (3, None)


def test_increment_of_a_whole_box() -> None:
    schema = schema_of(("F64", (6, 8)))
    rng = np.random.default_rng(0)
    box = Box((1, 2), (4, 3))
    positions = flat_positions(box, (6, 8))
    old, new = random_bits(rng, (12,), 8), random_bits(rng, (12,), 8)
    change = Change(tensor=0, box=box, index=None, old=old, new=new)
    expected = digest(dict(zip(positions, new.tolist(), strict=True)), 8) - digest(
        dict(zip(positions, old.tolist(), strict=True)), 8
    )
    assert change.computed_increment(schema) == expected
    assert change.flat_index(schema).tolist() == positions
    assert change.whole is change.new
    with pytest.raises(ValueError, match="t000: no old bits"):
        Change.resend(0, box, new, ZERO).computed_increment(schema)


def test_nothing_changed() -> None:
    schema = schema_of(("BF16", (0, 4)))
    none = np.empty(0, np.uint16)
    change = Change(tensor=0, box=Box((0, 0), (0, 4)), index=np.empty(0, np.uint32), old=none, new=none)
    change.check(schema)
    assert change.flat_index(schema).size == 0
    assert change.computed_increment(schema) == ZERO


def u16(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


GOOD = {"tensor": 0, "box": Box((0,), (4,)), "index": np.array([1, 3], np.uint32), "old": u16(1, 2), "new": u16(3, 4)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor": 1}, "change of tied: it is an alias of t"),
        ({"box": Box((1,), (4,))}, "outside its shape"),
        ({"box": Box((0, 0), (2, 2))}, "outside its shape"),
        ({"new": np.array([3, 4], np.uint32)}, "new uint32 for elements of dtype BF16"),  # F22
        ({"old": np.array([3, 4], np.int16)}, "old int16 for elements"),
        ({"dense": u16(1, 2, 3)}, "dense has shape"),
        ({"old": None}, "neither old bits nor an increment"),
        ({"new": u16(1, 2, 3)}, "must be 1-D of one length"),
        ({"new": u16(3, 4).reshape(1, 2), "old": u16(1, 2).reshape(1, 2)}, "must be 1-D of one length"),
        ({"index": None}, "2 values for a box of 4"),
        ({"index": np.array([1, 3], np.uint64)}, "index is uint64"),
        ({"index": np.array([1, 1], np.uint32)}, "strictly increasing"),
        ({"index": np.array([3, 1], np.uint32)}, "strictly increasing"),
        ({"index": np.array([1, 4], np.uint32)}, r"inside \[0, 4\)"),  # F65
        ({"index": np.array([-1, 3], np.int64)}, r"inside \[0, 4\)"),
    ],
)
def test_check(fields: dict, message: str) -> None:
    schema = Schema((TensorSpec("t", "BF16", (4,)), TensorSpec("tied", "BF16", (4,), alias_of="t")))
    Change(**GOOD).check(schema)
    with pytest.raises(ValueError, match=message):
        Change(**{**GOOD, **fields}).check(schema)
