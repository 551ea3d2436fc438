"""Affine maps against brute force: every element is enumerated, and nothing of the arithmetic is trusted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from torch_delta.vllm.routing.affine import NotAffine, make_piece, merge, refine
from torch_delta.vllm.routing.boxes import place, targets_overlap
from torch_delta.vllm.routing.plan import select


def elements(piece):
    """Source position -> position in the storage."""
    found = {}
    for index in product(*(range(dim.size) for dim in piece.dims)):
        source = piece.source + sum(at * dim.source for at, dim in zip(index, piece.dims, strict=True))
        assert source not in found
        found[source] = piece.target + sum(at * dim.target for at, dim in zip(index, piece.dims, strict=True))
    assert len(set(found.values())) == len(found)
    return found


def view_piece(generator):
    """A random strided view of a random tensor, copied into a random dense block, and what that maps by numpy."""
    shape = tuple(int(n) for n in generator.integers(1, 6, int(generator.integers(1, 4))))
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    where = []
    for extent in shape:
        first = int(generator.integers(0, extent))
        where.append(slice(first, int(generator.integers(first + 1, extent + 1)), int(generator.integers(1, 3))))
    view = flat[tuple(where)].transpose(generator.permutation(len(shape)))
    start = int(generator.integers(0, 50))
    target = start + np.arange(view.size).reshape(view.shape)
    first = int(view.reshape(-1)[0])
    steps = [stride // flat.itemsize for stride in view.strides]
    piece = make_piece(
        first, start, list(zip(view.shape, steps, [s // target.itemsize for s in target.strides], strict=True))
    )
    return shape, piece, dict(zip(view.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(200))
def test_a_view_is_what_numpy_says(seed) -> None:
    generator = np.random.default_rng(seed)
    shape, piece, expected = view_piece(generator)
    assert elements(piece) == expected
    assert piece.numel == len(expected)
    assert (piece.source_end - 1, piece.target_end - 1) == (max(expected), max(expected.values()))

    positions = np.flatnonzero(generator.random(int(np.prod(shape))) < 0.6)
    chosen, index = select(piece, positions)
    wanted = [at for at in positions.tolist() if at in expected]
    assert positions[chosen].tolist() == wanted
    assert index.tolist() == [expected[at] for at in wanted]

    finer = refine(shape, {dim.source for dim in piece.dims})
    placed = None if finer is None else place(piece, finer)
    if placed is None:
        return  # strides that do not divide each other: left to the reload path
    numbers = np.arange(int(np.prod(shape))).reshape(finer)
    box = tuple(slice(at, at + n) for at, n in zip(placed.box.offset, placed.box.shape, strict=True))
    for index_in_box in np.ndindex(placed.box.shape):
        target = piece.target + sum(at * step for at, step in zip(index_in_box, placed.strides, strict=True))
        assert expected[int(numbers[box][index_in_box])] == target
    assert numbers[box].size == len(expected)


def test_most_views_are_boxes_in_a_finer_shape() -> None:
    """So that the early return above does not hide that none is."""
    found = 0
    for seed in range(200):
        shape, piece, _ = view_piece(np.random.default_rng(seed))
        finer = refine(shape, {dim.source for dim in piece.dims})
        found += finer is not None and place(piece, finer) is not None
    assert found > 120


@pytest.mark.parametrize("seed", range(50))
def test_merging_keeps_every_element(seed) -> None:
    """Experts and halves: equal pieces at equal distances, some left out, some twice."""
    generator = np.random.default_rng(seed)
    inner = [(3, 1, 1), (2, 10, 3)]
    pieces = [
        make_piece(expert * 100 + half * 30, expert * 40 + half * 20, inner)
        for expert in range(5)
        for half in range(2)
        if generator.random() < 0.8
    ]
    pieces += pieces[:1]
    merged = merge(pieces)
    expected = {}
    for piece in pieces:
        expected |= elements(piece)
    found = [pair for piece in merged for pair in elements(piece).items()]
    assert len(found) == len(dict(found))
    assert dict(found) == expected


def test_all_experts_become_one_piece() -> None:
    pieces = [make_piece(e * 60 + h * 30, e * 60 + h * 30, [(30, 1, 1)]) for e in range(8) for h in range(2)]
    assert merge(pieces) == [make_piece(0, 0, [(480, 1, 1)])]
    swapped = [make_piece(e * 60 + h * 30, e * 60 + (1 - h) * 30, [(30, 1, 1)]) for e in range(8) for h in range(2)]
    assert len(merge(swapped)) == 2


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ([(4, 0, 1)], "one element lands in several places"),
        ([(4, 1, 0)], "several elements land in one place"),
        ([(4, 1, 1), (3, 2, 10)], "one element lands in several places"),
        ([(4, 1, 1), (3, 10, 2)], "several elements land in one place"),
    ],
)
def test_maps_that_are_not_one_to_one_are_refused(dims, reason) -> None:
    with pytest.raises(NotAffine, match=reason):
        make_piece(0, 0, dims)


@pytest.mark.parametrize("seed", range(200))
def test_overlap_of_targets_is_never_missed(seed) -> None:
    generator = np.random.default_rng(seed)
    _, first, one = view_piece(generator)
    _, second, other = view_piece(generator)
    # Strided targets: exchange the sides.
    turned = [make_piece(p.target, p.source, [(d.size, d.target, d.source) for d in p.dims]) for p in (first, second)]
    really = bool(one.keys() & other.keys())
    assert targets_overlap(*turned) or not really


def test_disjoint_columns_of_one_matrix_do_not_overlap() -> None:
    left = make_piece(0, 0, [(8, 3, 9), (3, 1, 1)])
    right = make_piece(0, 3, [(8, 6, 9), (6, 1, 1)])
    assert not targets_overlap(left, right)
    assert targets_overlap(left, make_piece(0, 2, [(8, 6, 9), (6, 1, 1)]))
