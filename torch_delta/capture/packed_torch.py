"""Reducing changes on the device that holds them: what crosses to the host for profile *small* is O(changed).

    region, index, old, new (device) ──▶ ranks in classes ──▶ gaps, steps, counts ──one copy──▶ `Reduced` on the host

The same result, bit for bit, as `torch_delta.codec.packed.reduced.reduce_change`, in torch operations that run on any
device. The host is waited for twice per box: for the histograms that pick the classes, and for the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torch_delta.codec.packed.classes import NO_CLASSES, NUM_CLASSES, Exponent, exponent_of, pick_boundary, sample_step
from torch_delta.codec.packed.pieces import Piece, pieces
from torch_delta.codec.packed.reduced import Reduced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.format.box import Box

_BLOCK = 64
"""Elements counted together; a changed element looks at one block to find its rank."""
_MOST_LOOKED_AT = 1 << 24
"""Elements of blocks in memory at once."""


class _Cut(NamedTuple):
    """A piece in which something changed, and where its positions begin and end."""

    piece: Piece
    begin: int
    end: int


def reduce_on_device(  # noqa: PLR0917 - as `reduce_change`
    dtype: str, box: Box, index: torch.Tensor, old: torch.Tensor, new: torch.Tensor, region: torch.Tensor
) -> tuple[Reduced, ...]:
    """Reduce the changes of a box for profile *small* where they are.

    Extra memory on the device: a few times one piece (8 MiB) and O(changed).

    Args:
        dtype: safetensors spelling.
        box: that the change is about.
        index: box-local positions, strictly increasing, int32 or int64 `[count]`.
        old: bits before, integers of the element's width `[count]`.
        new: bits after `[count]`.
        region: bits of the whole box, flat `[numel]`, from before or after the change; only read.

    Returns:
        One entry per piece in which something changed, ascending, on the host.
    """
    exponent = exponent_of(dtype)
    cuts = _cuts(box, old.element_size(), index)
    boundaries = _boundaries(exponent, cuts, old, region)
    reduced = [
        _reduce_piece(exponent, boundary, cut, index, old, new, region)
        for cut, boundary in zip(cuts, boundaries, strict=True)
    ]
    gaps = _to_host([gaps for gaps, _, _ in reduced], np.uint32)
    step = _to_host([step for _, step, _ in reduced], np.dtype(f"<u{old.element_size()}"))
    tables = torch.stack([table for _, _, table in reduced]).cpu().numpy() if reduced else ()
    return tuple(
        Reduced(
            start=cut.piece.start,
            boundary=boundary,
            counts=table[0],
            populations=table[1],
            gaps=gaps[cut.begin : cut.end],
            steps=step[cut.begin : cut.end],
        )
        for cut, boundary, table in zip(cuts, boundaries, tables, strict=True)
    )


def _cuts(box: Box, itemsize: int, index: torch.Tensor) -> list[_Cut]:
    found = list(pieces(box, itemsize))
    if len(found) == 1:
        return [_Cut(found[0], 0, index.numel())] if index.numel() else []
    starts = torch.tensor([piece.start for piece in found], dtype=index.dtype, device=index.device)
    begins = [*torch.searchsorted(index, starts).tolist(), index.numel()]
    return [
        _Cut(piece, begin, end) for piece, begin, end in zip(found, begins[:-1], begins[1:], strict=True) if end > begin
    ]


def _to_host(parts: Sequence[torch.Tensor], kind: Any) -> Any:
    """One copy, as unsigned integers."""
    return torch.cat(list(parts)).cpu().numpy().view(kind) if parts else np.empty(0, kind)


def _exponents(exponent: Exponent, bits: torch.Tensor) -> torch.Tensor:
    return ((bits & exponent.magnitude) >> exponent.shift).long()


def _boundaries(exponent: Exponent, cuts: Sequence[_Cut], old: torch.Tensor, region: torch.Tensor) -> list[int]:
    """Where the classes of each piece begin; as `classes.histograms` and `pick_boundary` have it."""
    if not exponent.num_bits:
        return [NO_CLASSES] * len(cuts)
    size = exponent.num_exponents
    histograms = torch.zeros(len(cuts), 2, size, dtype=torch.int64, device=old.device)
    for row, (piece, begin, end) in zip(histograms, cuts, strict=True):
        step = sample_step(piece.box.numel)
        for counts, bits, weight in (
            (row[0], region[piece.start : piece.stop : step], step),
            (row[1], old[begin:end], 1),
        ):
            where = _exponents(exponent, bits)
            counts.index_add_(0, where, torch.full_like(where, weight))
    return [pick_boundary(np.maximum(total, changed), changed) for total, changed in histograms.cpu().numpy()]


def _reduce_piece(  # noqa: PLR0917 - one caller
    exponent: Exponent,
    boundary: int,
    cut: _Cut,
    index: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    region: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaps int32 and steps grouped by class `[count]`, and counts and populations int64 `[2, NUM_CLASSES]`."""
    piece, begin, end = cut
    here, before = index[begin:end].long() - piece.start, old[begin:end]
    step = _ordered(new[begin:end], exponent) - _ordered(before, exponent)
    numel = piece.box.numel
    if boundary == NO_CLASSES:
        table = torch.zeros(2, NUM_CLASSES, dtype=torch.int64, device=old.device)
        table[0, 0], table[1, 0] = end - begin, numel
        return (torch.diff(here, prepend=here.new_full((1,), -1)) - 1).int(), step, table
    blocks = torch.zeros(-(-numel // _BLOCK) * _BLOCK, dtype=old.dtype, device=old.device)
    blocks[:numel] = region[piece.start : piece.stop]
    blocks[here] = before
    blocks = (blocks & exponent.magnitude).view(-1, _BLOCK)
    limits = exponent.limits(boundary)
    of_block = _count(blocks, limits)
    of_block[-1, 0] -= blocks.numel() - numel if _class(0, limits) == 0 else 0
    before_block = torch.cumsum(of_block, 0) - of_block
    classes = _classes(before & exponent.magnitude, limits)
    ranks = before_block[here // _BLOCK, classes] + _nearby(blocks, here, classes, limits)
    classes, order = torch.sort(classes, stable=True)
    ranks, step = ranks[order], step[order]
    is_first = torch.ones_like(ranks, dtype=torch.bool)
    torch.ne(classes[1:], classes[:-1], out=is_first[1:])
    previous = torch.where(is_first, -1, torch.roll(ranks, 1))
    counts = torch.zeros(NUM_CLASSES, dtype=torch.int64, device=old.device)
    counts.index_add_(0, classes, torch.ones_like(classes))
    return (ranks - previous - 1).int(), step, torch.stack((counts, of_block.sum(0)))


def _ordered(bits: torch.Tensor, exponent: Exponent) -> torch.Tensor:
    """As `steps.ordered`, in signed integers, whose differences wrap."""
    signed = bits.view(torch.int8) if bits.dtype == torch.uint8 else bits
    if not exponent.sign_magnitude:
        return signed
    top = 8 * bits.element_size() - 1
    return signed ^ ((signed >> top) & ((1 << top) - 1))


def _class(magnitude: int, limits: Sequence[int]) -> int:
    return sum(magnitude > limit for limit in limits[1:])


def _classes(magnitudes: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    """Classes of bits without sign, int64."""
    found = torch.zeros(magnitudes.shape, dtype=torch.int64, device=magnitudes.device)
    for limit in limits[1:]:
        found += magnitudes > limit
    return found


def _count(blocks: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    """Elements of each class in each block, int64 `[blocks, NUM_CLASSES]`."""
    above = torch.empty(len(blocks), NUM_CLASSES + 1, dtype=torch.int64, device=blocks.device)
    above[:, 0], above[:, -1] = blocks.shape[1], 0
    for number, limit in enumerate(limits[1:], start=1):
        torch.sum(blocks > limit, 1, out=above[:, number])
    return above[:, :-1] - above[:, 1:]


def _nearby(blocks: torch.Tensor, here: torch.Tensor, classes: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    """How many elements of its own class lie before each changed element in its block."""
    columns = torch.arange(_BLOCK, device=blocks.device)
    found = []
    step = max(1, _MOST_LOOKED_AT // _BLOCK)
    for at in range(0, here.numel(), step):
        places, own = here[at : at + step], classes[at : at + step]
        is_like = _classes(blocks[places // _BLOCK], limits) == own[:, None]
        is_like &= columns < (places % _BLOCK)[:, None]
        found.append(is_like.sum(1))
    return torch.cat(found)
