"""Every kind of change through every encoding and back; which encoding the writer picks; threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.oracle import DTYPES, digest, flat_positions, random_bits, schema_of, touch
from torch_delta.codec.change import Change, diff
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.encode import EncodedPart, encode_changes
from torch_delta.codec.encodings import xor
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO
from torch_delta.format.part import PartHeader, encode_part, parse_part

if TYPE_CHECKING:
    from torch_delta.format.schema import Schema

HEADER = PartHeader(stream_id="0" * 32, version=1, rank=0, seq=0)
ALL = ("coo", "packed", "xor", "dense")


def change_of(tensor: int, box: Box, old: np.ndarray, new: np.ndarray) -> Change:
    index = diff(old, new)
    return Change(
        tensor=tensor,
        box=box,
        index=index,
        old=old.reshape(-1)[index],
        new=np.ascontiguousarray(new).reshape(-1)[index],
    )


def through_a_part(schema: Schema, part: EncodedPart, old: dict[int, np.ndarray]) -> list[Change]:
    """Stored, parsed, decoded on top of `old` (whole tensors)."""
    stored = b"".join(encode_part(HEADER, part.frames, part.payloads, schema=schema))
    parsed = parse_part(stored, schema=schema, key="k")

    def read_old(tensor: int, box: Box) -> np.ndarray:
        view = old[tensor][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
        view = np.asarray(view)
        view.flags.writeable = False
        return view

    return [c for frame in parsed.frames for c in decode_frame(schema, frame, parsed.payload(frame), read_old)]


def write(changes: list[Change], old: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    new = {tensor: array.copy() for tensor, array in old.items()}
    for _ in range(2):  # absolute: writing twice changes nothing (F08)
        for change in changes:
            array = new[change.tensor]
            positions = flat_positions(change.box, array.shape)
            index = range(change.count) if change.index is None else change.index.tolist()
            flat = array.reshape(-1)
            flat[[positions[i] for i in index]] = change.new
    return new


@pytest.mark.parametrize("encoding", ["coo", "packed", "xor"])
def test_a_sum_in_bf16_would_not_give_the_new_value_back(encoding: str) -> None:
    """F26: deltas are steps between bits, or the bits themselves; adding differences of values drifts."""
    rng = np.random.default_rng(26)
    old, new = random_bits(rng, (4000,), 2), random_bits(rng, (4000,), 2)
    before, after = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (old, new))
    added = (before + (after - before)).view(torch.int16).numpy().view(np.uint16)
    assert int((added != new).sum()) > 1000, "else this says nothing"
    schema = schema_of(("BF16", (4000,)))
    change = change_of(0, Box((0,), (4000,)), old, new)
    part = encode_changes(schema, [change], encodings=(encoding,))
    (decoded,) = through_a_part(schema, part, {0: old})
    assert decoded.new.tolist() == new[old != new].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encodings", [("coo",), ("packed",), ("xor",), ("xor", "dense"), ALL])
@given(data=st.data())
def test_round_trip(dtype: str, encodings: tuple[str, ...], data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    schema = schema_of(*((dtype, shape) for shape in shapes))
    old = {t: random_bits(rng, shape, DTYPES[dtype]) for t, shape in enumerate(shapes)}
    share = data.draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    new = {t: np.asarray(touch(rng, array, share)) for t, array in old.items()}
    changes = []
    for t, shape in enumerate(shapes):
        cut = data.draw(st.integers(0, shape[0])) if shape else 0  # two boxes along the first dim
        halves = ((0, cut), (cut, shape[0] - cut)) if shape else ((0, 1),)
        for at, extent in halves:
            box = Box((at, *(0,) * (len(shape) - 1)), (extent, *shape[1:])) if shape else Box((), ())
            window = slice(at, at + extent) if shape else ...
            changes.append(change_of(t, box, old[t][window], new[t][window]))
    part = encode_changes(schema, changes[::-1], encodings=encodings)
    assert sum(s.count for f in part.frames for s in f.slices) == sum(change.count for change in changes)
    decoded = through_a_part(schema, part, old)
    result = write(decoded, old)
    for t, array in new.items():
        assert np.array_equal(result[t], array)
        total = ZERO
        for change in decoded:
            if change.tensor == t:
                total += change.increment
        bits = (digest(dict(enumerate(a.reshape(-1).tolist())), DTYPES[dtype]) for a in (array, old[t]))
        assert total == next(bits) - next(bits)


@pytest.mark.parametrize("encodings", [("coo",), ("packed",), ("xor",), ALL])
def test_column_boxes(encodings: tuple[str, ...]) -> None:
    schema = schema_of(("BF16", (6, 10)), ("F32", (2, 3, 4)))
    rng = np.random.default_rng(0)
    old = {0: random_bits(rng, (6, 10), 2), 1: random_bits(rng, (2, 3, 4), 4)}
    new = {t: touch(rng, array, 0.5) for t, array in old.items()}
    boxes = [(0, Box((0, 0), (6, 4))), (0, Box((0, 4), (6, 6))), (1, Box((0, 1, 0), (2, 2, 4)))]
    changes = []
    for t, box in boxes:
        window = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
        changes.append(change_of(t, box, old[t][window], new[t][window]))
    result = write(through_a_part(schema, encode_changes(schema, changes, encodings=encodings), old), old)
    new[1][:, 0] = old[1][:, 0]
    assert all(np.array_equal(result[t], array) for t, array in new.items())


def test_special_values_are_only_bits() -> None:  # F19, F27: NaN is a value like any other
    schema = schema_of(("BF16", (6,)))
    old = np.array([0x0000, 0x7FC0, 0x7F80, 0x3F80, 0xFFFF, 0x8000], np.uint16)
    new = np.array([0x8000, 0x7FC1, 0xFF80, 0x7FC0, 0xFFFF, 0x0000], np.uint16)
    for encodings in (("coo",), ("packed",), ("xor",), ("dense", "coo")):
        part = encode_changes(schema, [change_of(0, Box((0,), (6,)), old, new)], encodings=encodings)
        [change] = through_a_part(schema, part, {0: old})
        assert change.index.tolist() == [0, 1, 2, 3, 5]
        assert change.new.tolist() == [0x8000, 0x7FC1, 0xFF80, 0x7FC0, 0x0000]


def picked(schema: Schema, change: Change, **options: object) -> str:
    [frame] = encode_changes(schema, [change], **options).frames
    return frame.encoding


def test_the_smallest_encoding_is_picked() -> None:  # F30
    schema = schema_of(("BF16", (1000, 100)))
    rng = np.random.default_rng(0)
    box = Box((0, 0), (1000, 100))
    old = random_bits(rng, box.shape, 2)
    one, some = old.copy(), old.copy()
    one[500, 50] ^= 1
    some[rng.random(old.shape) < 0.01] ^= 1
    noise, low = old ^ rng.integers(1, 2**16, old.shape).astype(np.uint16), old ^ 1
    assert picked(schema, change_of(0, box, old, one)) == "coo"
    assert picked(schema, change_of(0, box, old, some)) == "packed"
    assert picked(schema, change_of(0, box, old, some), encodings=("coo", "xor", "dense")) == "xor"
    assert picked(schema, change_of(0, box, old, noise)) == "dense"
    assert picked(schema, change_of(0, box, old, low)) == "xor"  # every element, and next to no information
    assert picked(schema, change_of(0, box, old, low), absolute_only=True) == "dense"
    assert picked(schema, change_of(0, box, old, some), absolute_only=True) == "coo"
    half = touch(rng, old, 0.6)
    mostly = change_of(0, box, old, half)
    assert picked(schema, mostly, absolute_only=True) == "coo"
    with_box = Change(tensor=0, box=box, index=mostly.index, old=mostly.old, new=mostly.new, dense=half.reshape(-1))
    assert picked(schema, with_box, absolute_only=True) == "dense"
    part = encode_changes(schema, [with_box], absolute_only=True)
    [decoded] = through_a_part(schema, part, {0: old})
    assert decoded.index is None
    assert np.array_equal(decoded.new, half.reshape(-1))


def test_a_slice_that_does_not_compress_leaves_the_shared_frame() -> None:
    schema = schema_of(*[("BF16", (400, 400))] * 4)
    rng = np.random.default_rng(0)
    box = Box((0, 0), (400, 400))
    old = {t: random_bits(rng, box.shape, 2) for t in range(4)}
    new = {t: touch(rng, old[t], 0.01) for t in range(4)}
    new[2] = random_bits(rng, box.shape, 2)
    new[2][old[2] == new[2]] ^= 1
    changes = [change_of(t, box, old[t], new[t]) for t in range(4)]
    for others in (("packed", "xor"), ("xor",)):
        part = encode_changes(schema, changes, encodings=("coo", *others, "dense"))
        assert {f.encoding: [s.tensor for s in f.slices] for f in part.frames} == {others[0]: [0, 1, 3], "dense": [2]}
        result = write(through_a_part(schema, part, old), old)
        assert all(np.array_equal(result[t], new[t]) for t in range(4))


def test_small_slices_share_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xor, "_WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(xor, "_STRETCH_BYTES", 1 << 18)
    rng = np.random.default_rng(0)
    shapes = [(300, 1000)] * 20 + [(5000, 1000)] + [(50,)] * 30
    schema = schema_of(*(("BF16", shape) for shape in shapes))
    old = {t: random_bits(rng, shape, 2) for t, shape in enumerate(shapes)}
    new = {t: touch(rng, array, 0.02) for t, array in old.items()}
    changes = [change_of(t, Box.whole(old[t].shape), old[t], new[t]) for t in old]
    part = encode_changes(schema, changes, encodings=("xor",))
    raw = [frame.raw_bytes for frame in part.frames]
    assert len(part.frames) == 4  # 13 + 7 small ones, the large one alone, the tiny ones
    assert max(raw) == 10_000_000
    assert all(size <= 8 << 20 for frame, size in zip(part.frames, raw, strict=True) if len(frame.slices) > 1)
    decoded = through_a_part(schema, part, old)
    for change in decoded:
        flat = old[change.tensor].reshape(-1).copy()
        flat[change.index] = change.new
        assert np.array_equal(flat, new[change.tensor].reshape(-1))
    assert [c.tensor for c in decoded] == sorted(c.tensor for c in changes if c.count)


@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1])
def test_boxes_beyond_31_and_32_bits(numel: int) -> None:
    # An index per change is all that exists of these tensors; the reader's copy is one element repeated (no memory).
    schema = schema_of(("BF16", (3, numel)))
    box = Box((1, 0), (2, numel))
    at = [0, numel - 2, numel - 1, 2 * numel - 1]
    kind = np.uint32 if box.numel < 2**32 else np.int64
    old, new = np.full(4, 7, np.uint16), np.array([1, 2, 3, 4], np.uint16)
    change = Change(tensor=0, box=box, index=np.array(at, kind), old=old, new=new)
    part = encode_changes(schema, [change], encodings=("coo",))
    [frame], [payload] = part.frames, part.payloads
    wide = box.numel > 2**32 - 1
    assert set(payload) == {"coo.index.u64" if wide else "coo.index.u32", "coo.value.BF16"}  # rule E2
    expected = digest({numel + i: int(w) for i, w in zip(at, new, strict=True)}, 2) - digest(
        {numel + i: 7 for i in at}, 2
    )
    assert frame.slices[0].increment == expected

    def read_old(_: int, box: Box) -> np.ndarray:
        return np.broadcast_to(np.uint16(7), box.shape)

    [decoded] = decode_frame(schema, frame, payload, read_old)
    assert decoded.index.tolist() == at
    assert decoded.index.dtype == kind
    assert decoded.new.tolist() == [1, 2, 3, 4]
    assert decoded.flat_index(schema).tolist() == [numel + i for i in at]


def test_resent_boxes_need_no_old_bits() -> None:
    schema = schema_of(("F32", (4, 5)))
    rng = np.random.default_rng(0)
    old, new = random_bits(rng, (4, 5), 4), random_bits(rng, (4, 5), 4)
    box = Box((1, 0), (2, 5))
    positions = flat_positions(box, (4, 5))
    increment = digest({i: int(new.reshape(-1)[i]) for i in positions}, 4) - digest(
        {i: int(old.reshape(-1)[i]) for i in positions}, 4
    )
    change = Change.resend(0, box, new[1:3], increment)
    for encodings in (ALL, ("coo",)):
        part = encode_changes(schema, [change], encodings=encodings)
        assert [frame.encoding for frame in part.frames] == ["dense" if "dense" in encodings else "coo"]
        result = write(through_a_part(schema, part, {0: old}), {0: old})
        assert np.array_equal(result[0][1:3], new[1:3])
        assert np.array_equal(result[0][::3], old[::3])
    with pytest.raises(ValueError, match=r"change of t000: none of xor can carry it \(old bits not known"):
        encode_changes(schema, [change], encodings=("xor",))


def test_nothing_to_say() -> None:
    schema = schema_of(("BF16", (3,)), ("BF16", (0, 2)))
    none = np.empty(0, np.uint16)
    unchanged = [
        Change(tensor=t, box=Box.whole(shape), index=np.empty(0, np.uint32), old=none, new=none)
        for t, shape in enumerate([(3,), (0, 2)])
    ]
    for changes in ([], unchanged):
        part = encode_changes(schema, changes)
        assert (part.frames, part.payloads) == ((), ())
        assert through_a_part(schema, part, {}) == []


def test_bad_arguments() -> None:
    schema = schema_of(("BF16", (4,)))
    bits = np.zeros(4, np.uint16)
    change = change_of(0, Box((0,), (4,)), bits, bits + np.uint16(1))
    with pytest.raises(ValueError, match="unknown encoding 'zip'; known: coo, packed, xor, dense"):
        encode_changes(schema, [change], encodings=("zip",))
    with pytest.raises(ValueError, match="zstd level is 0"):
        encode_changes(schema, [change], level=0, encodings=("xor",))
    with pytest.raises(ValueError, match="absolute_only=True"):
        encode_changes(schema, [change], absolute_only=True, encodings=("xor",))
    with pytest.raises(ValueError, match="change of t000: old"):
        encode_changes(schema, [Change(tensor=0, box=change.box, index=None, old=bits.view(np.int16), new=bits)])


def test_threads_share_nothing() -> None:
    # zstandard's compressor objects crash the process when two threads use one at a time.
    schema = schema_of(*[("BF16", (64, 512))] * 8)
    rng = np.random.default_rng(0)
    old = {t: random_bits(rng, (64, 512), 2) for t in range(8)}
    new = {t: touch(rng, array, 0.02) for t, array in old.items()}
    changes = [change_of(t, Box.whole((64, 512)), old[t], new[t]) for t in old]

    def both(_: int) -> list[bytes]:
        part = encode_changes(schema, changes)
        through_a_part(schema, part, old)
        return [bytes(data) for payload in part.payloads for data in payload.values()]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(both, range(40)))
    assert all(result == results[0] for result in results)


def test_a_pool_does_not_change_the_bytes() -> None:
    # Frames of every encoding, and one that loses a slice to another encoding and is packed again.
    schema = schema_of(*[("BF16", (800, 1000))] * 16, ("F32", (10,)))
    rng = np.random.default_rng(0)
    old = {t: random_bits(rng, spec.shape, 4 if t == 16 else 2) for t, spec in enumerate(schema.tensors)}
    new = {t: touch(rng, array, (0.02, 1e-5)[t % 2]) for t, array in old.items()}
    new[2] = old[2] ^ 1 ^ (random_bits(rng, new[2].shape, 2) & 0xFFFE)
    changes = [change_of(t, Box.whole(old[t].shape), old[t], new[t]) for t in old]
    new[4] = old[4] ^ 1
    changes[4] = change_of(4, Box.whole(old[4].shape), old[4], new[4])
    alone = encode_changes(schema, changes)
    assert {frame.encoding for frame in alone.frames} == {"coo", "packed", "xor", "dense"}
    assert sum(frame.encoding == "packed" for frame in alone.frames) > 1
    with ThreadPoolExecutor(3) as pool:
        shared = encode_changes(schema, changes, pool=pool)
    # Frames compare by identity.
    assert [(f.encoding, f.slices, f.stored_bytes, f.raw_bytes) for f in shared.frames] == [
        (f.encoding, f.slices, f.stored_bytes, f.raw_bytes) for f in alone.frames
    ]
    assert [{k: bytes(v) for k, v in p.items()} for p in shared.payloads] == [
        {k: bytes(v) for k, v in p.items()} for p in alone.payloads
    ]


@pytest.mark.parametrize("level", [1, 3, 19])
def test_levels(level: int) -> None:
    schema = schema_of(("BF16", (300, 1000)))
    rng = np.random.default_rng(0)
    old = random_bits(rng, (300, 1000), 2)
    new = touch(rng, old, 0.02)
    part = encode_changes(schema, [change_of(0, Box.whole(old.shape), old, new)], level=level, encodings=("xor",))
    assert np.array_equal(write(through_a_part(schema, part, {0: old}), {0: old})[0], new)
