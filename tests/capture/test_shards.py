"""Shard arithmetic against torch.chunk, and pieces of checkpoint tensors against plain slicing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_delta.capture.layout import View
from torch_delta.capture.ownership import Claim, Held, elect, least_loaded
from torch_delta.capture.regions import is_natural, pieces_of, row_major
from torch_delta.capture.shards import _check_order, global_indices, shard_from_placements, whole
from torch_delta.errors import CaptureError


def by_chunks(full, mesh_shape, coordinate, placements):
    """What DTensor does, on data: cut with torch.chunk axis by axis."""
    for size, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        blocks = getattr(placement, "split_factor", 1)
        parts = []
        for block in torch.chunk(full, blocks, placement.dim):
            pieces = torch.chunk(block, size, placement.dim)
            if position < len(pieces):
                parts.append(pieces[position])
        full = torch.cat(parts, placement.dim) if parts else full.narrow(placement.dim, 0, 0)
    return full


PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 1)),
    st.builds(_StridedShard, st.integers(0, 1), split_factor=st.integers(1, 3)),
)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    mesh=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    placements=st.tuples(PLACEMENTS, PLACEMENTS),
)
def test_shards_are_what_chunks_are(shape, mesh, placements):
    """F37, F42: uneven, empty and strided shards."""
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    for coordinate in product(*map(range, mesh)):
        shard = shard_from_placements("t", shape, mesh, coordinate, placements)
        expected = by_chunks(full, mesh, coordinate, placements)
        assert shard.shape == shape
        assert shard.numel == expected.numel()
        if shard.numel:
            assert shard.local_shape == tuple(expected.shape)
            assert torch.equal(global_indices(shard).reshape(shard.local_shape), expected)


@pytest.mark.parametrize("placement", [Partial(), object()])
def test_unknown_placements_are_refused(placement):
    with pytest.raises(CaptureError, match=r"t: placement .* cannot be published") as caught:
        shard_from_placements("t", (4,), (2,), (0,), (placement,))
    assert caught.value.tensor == "t"


def test_scalars_and_empty_tensors():
    assert whole(()).numel == 1
    assert global_indices(whole(())).tolist() == [0]
    assert whole((0, 3)).numel == 0


@st.composite
def layouts(draw):
    """A parameter, its checkpoint tensors as torch views of it, and a shard of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    full = torch.arange(int(np.prod(shape))).reshape(shape)
    views = [full]
    for _ in range(draw(st.integers(0, 2))):
        dim = draw(st.integers(0, views[0].dim() - 1)) if views[0].dim() else 0
        kind = draw(st.sampled_from(["chunk", "unbind", "transpose", "stride"]))
        if not views[0].dim():
            break
        if kind == "chunk":
            views = [part for view in views for part in torch.chunk(view, 2, dim)]
        elif kind == "unbind":
            views = [part for view in views for part in view.unbind(dim)]
        elif kind == "transpose":
            views = [view.transpose(0, dim) for view in views]
        else:
            views = [view[(slice(None),) * dim + (slice(start, None, 2),)] for view in views for start in (0, 1)]
        views = [view for view in views if view.numel()]
        if any(view.dim() != views[0].dim() for view in views):
            break
    placements = draw(st.tuples(PLACEMENTS, PLACEMENTS))
    placements = [p if isinstance(p, Replicate) or p.dim < len(shape) else Replicate() for p in placements]
    return full, views, placements


@given(layout=layouts())
def test_pieces_hold_what_slicing_gives(layout):
    """Every local element is in exactly one piece, at the checkpoint position plain indexing gives (F57)."""
    full, tensors, placements = layout
    views = {n: View("p", tuple(t.shape), t.storage_offset(), t.stride()) for n, t in enumerate(tensors)}
    mesh = (2, 2)
    covered = {n: torch.zeros_like(t) for n, t in views.items() for t in [tensors[n]]}
    for coordinate in product(*map(range, mesh)):
        shard = shard_from_placements("p", full.shape, mesh, coordinate, placements)
        local = full.reshape(-1)[global_indices(shard)]
        seen = []
        for piece in pieces_of(views, shard):
            values = local.as_strided(piece.box.shape, piece.strides, piece.offset)
            window = tuple(slice(a, a + n) for a, n in zip(piece.box.offset, piece.box.shape, strict=True))
            assert torch.equal(values, tensors[piece.tensor][window])
            covered[piece.tensor][window] += 1
            seen += values.reshape(-1).tolist()
        assert sorted(seen) == sorted(local.tolist())
    copies = 4 if all(isinstance(p, Replicate) for p in placements) else None
    if copies:
        assert all((count == copies).all() for count in covered.values())


def test_natural_order_is_recognised():
    shape = (4, 6)
    assert is_natural(pieces_of({0: View("p", shape, 0, row_major(shape))}, whole(shape)))
    assert is_natural(pieces_of({0: View("p", (2, 6), 0, (6, 1)), 1: View("p", (2, 6), 12, (6, 1))}, whole(shape)))
    assert not is_natural(pieces_of({0: View("p", (6, 4), 0, (1, 6))}, whole(shape)))


def test_merged_dims_are_refused():
    with pytest.raises(CaptureError, match="merges or splits dims"):
        pieces_of({0: View("p", (12,), 0, (1,))}, whole((3, 4)))


def _claim(name, shape, runs, mark=b"x", is_buffer=False):
    return Claim({name: Held(shape, runs, 8, is_buffer, mark)})


def test_election_refuses_holes_and_overlaps():
    """F59, F60: the parts must be the tensor."""
    hole = [_claim("t", (4,), (((0, 2),),)), _claim("t", (4,), (((3, 1),),))]
    with pytest.raises(CaptureError, match="leave a hole"):
        elect(hole)
    overlap = [_claim("t", (4,), (((0, 3),),)), _claim("t", (4,), (((2, 2),),))]
    with pytest.raises(CaptureError, match="overlap"):
        elect(overlap)
    shapes = [_claim("t", (4,), (((0, 4),),)), _claim("t", (5,), (((0, 5),),))]
    with pytest.raises(CaptureError, match="disagree about its full shape"):
        elect(shapes)


def test_buffers_come_from_the_first_rank_and_may_differ():
    claims = [_claim("b", (4,), (((0, 4),),), mark, is_buffer=True) for mark in (b"x", b"y")]
    assert elect(claims) == [{"b"}, set()]


def test_shares_are_balanced():
    shares = least_loaded([(size, size, [0, 1, 2]) for size in range(1, 31)], 3)
    loads = [sum(share) for share in shares]
    assert sorted(key for share in shares for key in share) == list(range(1, 31))
    assert max(loads) - min(loads) <= 3


def test_an_unusual_order_of_shards_is_refused():
    """Two mesh axes that cut one dim may do so in either order; placements alone do not say in which."""

    class Spec:
        placements = (Shard(0), Shard(0))
        shard_order = ((0, (0, 1)),)

        @staticmethod
        def compute_default_shard_order(placements):
            assert placements == Spec.placements
            return ((0, (0, 1)),)

    class Tensor:
        _spec = Spec()

    _check_order("w", Tensor())
    Tensor._spec.shard_order = ((0, (1, 0)),)
    with pytest.raises(CaptureError, match="w: unusual shard order") as caught:
        _check_order("w", Tensor())
    assert caught.value.tensor == "w"
