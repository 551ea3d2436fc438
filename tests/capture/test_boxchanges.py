"""From positions in a unit to changes of its boxes: the same as comparing every box element by element."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_delta.capture.boxchanges import changes_of, slots_of
from torch_delta.capture.history import Record
from torch_delta.capture.regions import Piece, row_major
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO, digest_words
from torch_delta.format.schema import Schema, TensorSpec

COLUMNS = 5


def unit_of(cuts):
    """A unit of the rows of one tensor, cut into boxes, and the same rows of a second one as the last piece."""
    rows = sum(cuts)
    schema = Schema((TensorSpec("a", "BF16", (rows + 2, COLUMNS)), TensorSpec("b", "BF16", (3,))))
    pieces, at = [], 0
    for count in cuts:
        box = Box((at + 1, 0), (count, COLUMNS))
        pieces.append(Piece(0, box, at * COLUMNS, row_major(box.shape)))
        at += count
    if len(cuts) > 1:
        pieces.append(Piece(1, Box((0,), (3,)), at * COLUMNS, (1,)))
    starts = np.cumsum([0, *(piece.numel for piece in pieces)], dtype=np.int64)
    return schema, SimpleNamespace(name="unit", pieces=tuple(pieces), starts=starts)


def digest_of(bits, box):
    """By the definition; the boxes here are whole rows, and so one run of their tensor."""
    return digest_words(map(int, bits), box.offset[0] * COLUMNS if len(box.shape) > 1 else 0)


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    share=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    reduces=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_boxes_are_as_compared_one_by_one(cuts, share, reduces, seed):
    schema, unit = unit_of(cuts)
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 1 << 16, unit.starts[-1], dtype=np.uint16)
    now = np.where(rng.random(before.size) < share, before ^ np.uint16(3), before)
    index = np.flatnonzero(now != before).astype(np.int32)
    as_torch = [torch.from_numpy(bits.view(np.int16)) for bits in (before[index], now[index], now)]
    record = Record(torch.from_numpy(index), as_torch[0], as_torch[1])
    known = [ZERO] * len(unit.pieces)
    found = dict(changes_of(slots_of(schema, unit), record, known, lambda: as_torch[2], reduces=reduces))
    for number, piece in enumerate(unit.pieces):
        old, new = (bits[unit.starts[number] : unit.starts[number + 1]] for bits in (before, now))
        places = [
            at for at, (was, becomes) in enumerate(zip(old.tolist(), new.tolist(), strict=True)) if was != becomes
        ]
        if not places:
            assert number not in found
            continue
        change = found.pop(number)
        assert (change.tensor, change.box) == (piece.tensor, piece.box)
        change.check(schema)
        assert change.index.tolist() == places
        assert change.old.tolist() == old[places].tolist()
        assert change.new.tolist() == new[places].tolist()
        assert change.increment == digest_of(new, piece.box) - digest_of(old, piece.box)
        assert change.increment == change.digests[1] - change.digests[0]
        assert (change.reduced is not None) == reduces
        is_large = piece.numel > len(places) >= piece.numel * 2 / 6
        assert (change.dense is None) == (not is_large)
        assert change.dense is None or change.dense.tolist() == new.tolist()
    assert not found


@pytest.mark.parametrize("cuts", [[3], [1, 2]])
def test_lost_units_are_sent_whole(cuts):
    """Without old bits every box goes whole, and its increment comes from the digest known."""
    schema, unit = unit_of(cuts)
    bits = np.arange(100, 100 + unit.starts[-1], dtype=np.uint16)
    slots = slots_of(schema, unit)
    boxes = [(bits[slot.span], slot.piece.box) for slot in slots]
    known = [digest_of(part[::-1], box) for part, box in boxes]
    record = Record(None, None, torch.from_numpy(bits.view(np.int16)))
    found = list(changes_of(slots, record, known, lambda: record.new, reduces=True))
    assert [number for number, _ in found] == list(range(len(unit.pieces)))
    for (number, change), (part, box) in zip(found, boxes, strict=True):
        assert change.index is None
        assert change.old is None
        assert change.new.tolist() == part.tolist()
        assert change.increment == digest_of(part, box) - known[number]
