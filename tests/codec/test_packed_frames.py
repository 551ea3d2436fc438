"""`packed` frames of several slices: decoded in few calls, and to the same as slice by slice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.oracle import digest, flat_positions, random_bits, schema_of
from tests.codec.test_packed import compiled, moved, read, weights
from torch_delta.codec.change import Change, diff
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.digest import digest_many
from torch_delta.codec.encodings.packed import Packed
from torch_delta.codec.geometry import Layout
from torch_delta.codec.kernels import DIGEST_CHANGES, DIGEST_DELTA
from torch_delta.codec.packed.reduced import reduce_change
from torch_delta.errors import DigestMismatch, FormatError
from torch_delta.format.box import Box
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.frames import Frame, Slice

DTYPES = ["BF16", "F32", "F64", "F8_E4M3", "F16", "I16", "U8", "I64"]


def change_in(box: Box, dtype: str, old: np.ndarray, new: np.ndarray, *, small: bool, tensor: int) -> Change | None:
    """What changed in a box of a tensor; None if nothing did."""
    where = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
    before, after = (np.ascontiguousarray(array[where]).reshape(-1) for array in (old, new))
    index = diff(before, after)
    if not index.size:
        return None
    reduced = reduce_change(dtype, box, index, before[index], after[index], before) if small else None
    return Change(tensor=tensor, box=box, index=index, old=before[index], new=after[index], reduced=reduced)


def framed(schema, changes: list[Change]) -> tuple[Frame, bytes]:
    packed = Packed().pack(schema, changes, level=1)
    slices = tuple(Slice(c.tensor, c.box, c.count, c.computed_increment(schema)) for c in changes)
    return Frame("packed", slices, packed.stored_bytes, packed.raw_bytes), bytes(packed.payload["packed"])


@given(data=st.data())
def test_slices_of_any_widths_share_a_frame(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=6))
    schema = schema_of(*((dtype, (7, 60)) for dtype in dtypes))
    old = {t: weights(rng, (7, 60), dtype) for t, dtype in enumerate(dtypes)}
    new = {
        t: moved(rng, array, data.draw(st.sampled_from([0.02, 0.3, 1.0])), data.draw(st.sampled_from(["unit", "any"])))
        for t, array in old.items()
    }
    boxes = [Box.whole((7, 60)), Box((2, 0), (3, 60)), Box((1, 5), (6, 50)), Box((4, 7), (1, 1))]
    changes = []
    for t, dtype in enumerate(dtypes):
        box, small = data.draw(st.sampled_from(boxes)), data.draw(st.booleans())
        change = change_in(box, dtype, old[t], new[t], small=small, tensor=t)
        changes += [] if change is None else [change]
    if not changes:
        return
    frame, blob = framed(schema, changes)
    for yes in (True, False):
        with compiled(yes=yes):
            decoded = decode_frame(schema, frame, {"packed": blob}, read(old))
        for change, result in zip(changes, decoded, strict=True):
            assert result.index.tolist() == change.index.tolist()
            assert result.old.tolist() == change.old.tolist()
            assert result.new.tolist() == change.new.tolist()


@pytest.mark.parametrize("yes", [True, False], ids=["compiled", "reference"])
@pytest.mark.parametrize("bad", range(4))
def test_the_tensor_that_does_not_fit_is_named(bad: int, yes: bool) -> None:  # rule E6
    rng = np.random.default_rng(0)
    dtypes = ["BF16", "F32", "F32", "BF16"]
    schema = schema_of(*((dtype, (40, 50)) for dtype in dtypes))
    old = {t: weights(rng, (40, 50), dtype) for t, dtype in enumerate(dtypes)}
    changes = []
    for t, dtype in enumerate(dtypes):
        magnitude = old[t] & old[t].dtype.type((1 << 8 * old[t].itemsize - 1) - 1)
        new = old[t] ^ (magnitude < np.median(magnitude)).astype(old[t].dtype)  # so that classes pay
        changes.append(change_in(Box.whole((40, 50)), dtype, old[t], new, small=True, tensor=t))
    frame, blob = framed(schema, changes)
    old[bad] = np.zeros_like(old[bad])  # one class instead of eight
    with compiled(yes=yes), pytest.raises(DigestMismatch, match="numbers of elements by exponent") as caught:
        decode_frame(schema, frame, {"packed": blob}, read(old))
    assert caught.value.tensor == f"t{bad:03}"


@pytest.mark.parametrize("yes", [True, False], ids=["compiled", "reference"])
def test_a_position_outside_a_later_box(yes: bool) -> None:  # rule E9
    old = {t: np.arange(100, dtype=np.uint16) for t in range(3)}
    new = {t: array + np.uint16(1) * (np.arange(100) % 50 == 49) for t, array in old.items()}
    schema = schema_of(*(("U16", (100,)) for _ in old))
    boxes = [Box.whole((100,))] * 3
    changes = [change_in(boxes[t], "U16", old[t], new[t].astype(np.uint16), small=False, tensor=t) for t in range(3)]
    frame, blob = framed(schema, changes)
    shorter = (*frame.slices[:2], replace(frame.slices[2], box=Box((0,), (99,))))
    frame = Frame("packed", shorter, frame.stored_bytes, frame.raw_bytes - 2)
    with compiled(yes=yes), pytest.raises(FormatError, match="t002: a position outside its box of 99") as caught:
        decode_frame(schema, frame, {"packed": blob}, read(old))
    assert caught.value.rule == "E9"


@pytest.mark.parametrize("way", ["numpy", "compiled"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(seed=st.integers(0, 99), rows=st.lists(st.booleans(), min_size=1, max_size=4))
def test_digests_of_many_boxes(way: str, width: int, seed: int, rows: list[bool]) -> None:
    rng = np.random.default_rng(seed)
    full = (9, 150)
    boxes = [Box((2, 0), (7, 150)) if whole else Box((1, 20), (8, 120)) for whole in rows]
    parts = [np.flatnonzero(rng.random(box.numel) < rng.choice([0, 0.01, 0.2])).astype(np.uint32) for box in boxes]
    starts = np.cumsum([0, *(part.size for part in parts)])
    old, new = (random_bits(rng, (int(starts[-1]),), width) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for kernel in (DIGEST_DELTA, *DIGEST_CHANGES.values()):
            chosen = kernel.compile() if way == "compiled" else None
            patch.setattr(kernel, "get", lambda _, chosen=chosen: chosen)
        got = digest_many([Layout.of(box, full) for box in boxes], starts, np.concatenate(parts), old, new)
    for number, (box, part) in enumerate(zip(boxes, parts, strict=True)):
        positions = flat_positions(box, full)
        places = [positions[at] for at in part.tolist()]
        here = slice(int(starts[number]), int(starts[number + 1]))
        expected = tuple(digest(dict(zip(places, bits[here].tolist(), strict=True)), width) for bits in (old, new))
        assert got[number] == expected


def test_every_width_is_tried() -> None:
    assert {ITEMSIZE[dtype] for dtype in DTYPES} == {1, 2, 4, 8}
