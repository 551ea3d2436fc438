"""The proof that every element has one owner, and that the slices of a rank lie in what it owns, each element once."""

from __future__ import annotations

import re

import pytest

from torch_delta.errors import CaptureError
from torch_delta.format.box import Box
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.publish.coverage import Ownership

SCHEMA = Schema(
    (TensorSpec("a", "BF16", (4, 6)), TensorSpec("b", "F32", (3,)), TensorSpec("c", "BF16", (4, 6), alias_of="a"))
)
TOP, BOTTOM, WHOLE = (0, Box((0, 0), (2, 6))), (0, Box((2, 0), (2, 6))), (0, Box((0, 0), (4, 6)))
B = (1, Box((0,), (3,)))


def test_boxes_that_tile_every_tensor_are_fine():
    # rule W4
    for by_rank in ({0: [WHOLE, B]}, {0: [TOP], 1: [BOTTOM, B]}, {0: [TOP, BOTTOM], 1: [], 2: [B]}):
        assert Ownership(SCHEMA, by_rank).by_rank == {rank: tuple(boxes) for rank, boxes in by_rank.items()}


@pytest.mark.parametrize(
    ("by_rank", "constant", "said"),
    [
        ({0: [TOP], 1: [B]}, (), "a: 12 of 24 elements have an owner"),
        ({0: [TOP, B]}, (0,), "a is an alias or constant and yet a rank owns a part of it"),
        ({0: [WHOLE], 1: [BOTTOM, B]}, (), r"a: boxes .* and .* overlap"),
        ({0: [WHOLE, B], 1: [B]}, (), r"b: boxes .* and .* overlap"),
        ({0: [WHOLE, (1, Box((1,), (3,)))]}, (), r"b: box .* lies outside its shape \[3\]"),
        ({0: [WHOLE, B], 1: [(2, WHOLE[1])]}, (), "c is an alias or constant"),
        ({0: [WHOLE, B], 1: [(3, Box((0,), (1,)))]}, (), "rank 1 owns part of tensor number 3, of 3"),
        ({}, (), "a: 0 of 24 elements have an owner; b: 0 of 3"),
    ],
)
def test_anything_else_is_refused(by_rank, constant, said):
    # rule W4, F39, F60
    with pytest.raises(CaptureError, match=said):
        Ownership(SCHEMA, by_rank, constant=constant)


def test_a_long_list_of_problems_is_cut():
    many = Schema(tuple(TensorSpec(f"t{number:02}", "BF16", (2,)) for number in range(14)))
    with pytest.raises(CaptureError, match=r"t09: 0 of 2 elements have an owner \(and 4 more\)") as caught:
        Ownership(many, {})
    assert len(caught.value.problems) == 10


@pytest.mark.parametrize(
    ("slices", "said"),
    [
        ([], None),
        ([BOTTOM], None),
        ([(0, Box((2, 0), (1, 6))), (0, Box((3, 0), (1, 3))), (0, Box((3, 3), (1, 3))), B], None),
        ([TOP], "a: rank 1 sent .* which it does not own"),
        ([(0, Box((1, 0), (2, 6)))], "a: rank 1 sent .* which it does not own"),  # half of it is
        ([(0, Box((2,), (2,)))], "a: rank 1 sent .* which it does not own"),
        ([(7, Box((0,), (1,)))], "tensor 7: rank 1 sent .* which it does not own"),
        ([BOTTOM, B, BOTTOM], "a: rank 1 sent .* twice"),
        ([BOTTOM, (0, Box((3, 5), (1, 1)))], "a: rank 1 sent overlapping slices"),
        ([(0, Box((2, 0), (2, 4))), (0, Box((3, 3), (1, 3)))], "a: rank 1 sent overlapping slices"),
    ],
)
def test_what_a_rank_sends_lies_in_what_it_owns(slices, said):
    # rule W4
    ownership = Ownership(SCHEMA, {0: [TOP], 1: [BOTTOM, B]})
    found = ownership.objection(1, slices)
    assert found is None if said is None else re.search(said, found or "")
    assert (ownership.objection(2, slices) is None) == (not slices)  # a rank that owns nothing
