"""`packed` against an oracle that was written from docs/format.md, and its compiled twins against its reference."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec import packed_oracle
from tests.codec.oracle import digest, random_bits, schema_of, touch
from torch_delta.codec.change import Change, diff
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.encode import encode_changes
from torch_delta.codec.encodings.packed import Packed
from torch_delta.codec.packed import (
    kernels,
    kernels_boundary,
    kernels_gather,
    kernels_locate,
    kernels_streams,
)
from torch_delta.codec.packed.classes import NO_CLASSES, exponent_of, fixed_log2
from torch_delta.codec.packed.pieces import pieces
from torch_delta.codec.packed.reduced import reduce_change
from torch_delta.codec.packed.steps import stepped, steps
from torch_delta.format.box import Box
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.frames import Frame, Slice

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ALL_KERNELS = [
    *kernels_boundary.BOUNDARY.values(),
    *kernels.RANK.values(),
    *kernels_locate.LOCATE.values(),
    *kernels_locate.LOCATE_FLAT.values(),
    *kernels_streams.EMIT.values(),
    *kernels_gather.GATHER.values(),
    kernels_gather.VARINTS,
]


@contextmanager
def compiled(*, yes: bool) -> Iterator[None]:
    """Run the compiled twins, or the reference, whatever the sizes."""
    before = [(kernel._function, kernel._worth) for kernel in ALL_KERNELS]
    for kernel in ALL_KERNELS:
        if yes:
            kernel._worth = 0  # compiled when first used: a test pays for the widths it needs
        else:
            kernel._function, kernel._worth, kernel._has_looked = None, 1 << 62, True
    try:
        yield
    finally:
        for kernel, (function, worth) in zip(ALL_KERNELS, before, strict=True):
            kernel._function, kernel._worth = kernel._function or function, worth


def change_of(dtype: str, old: np.ndarray, new: np.ndarray, *, small: bool, tensor: int = 0) -> Change:
    index, box = diff(old, new), Box.whole(old.shape)
    before, after = old.reshape(-1)[index], new.reshape(-1)[index]
    reduced = reduce_change(dtype, box, index, before, after, old) if small else None
    return Change(tensor=tensor, box=box, index=index, old=before, new=after, reduced=reduced)


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normally distributed floats of a dtype as bits, or any bits."""
    values = rng.normal(0, 0.02, shape).astype(np.float32)
    match dtype:
        case "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        case "F16":
            return values.astype(np.float16).view(np.uint16)
        case "F32":
            return values.view(np.uint32)
        case "F64":
            return values.astype(np.float64).view(np.uint64)
    return random_bits(rng, shape, ITEMSIZE[dtype])


def moved(rng: np.random.Generator, old: np.ndarray, share: float, kind: str) -> np.ndarray:
    """Some elements changed: by one unit, to anything, by one bit, or to one constant."""
    where = rng.random(old.shape) < share
    width = old.itemsize
    match kind:
        case "unit":
            new = old + rng.choice(np.array([1, 2 ** (8 * width) - 1], old.dtype), old.shape)
        case "any":
            new = random_bits(rng, old.shape, width)
        case "bit":
            new = old ^ (old.dtype.type(1) << rng.integers(0, 8 * width, old.shape).astype(old.dtype))
        case "constant":
            new = np.full_like(old, 5)
    return np.where(where, new, old)


CASES = {
    "pick": st.integers(0, 999),
    "seed": st.integers(0, 9999),
    "shapes": st.lists(st.lists(st.integers(1, 40), max_size=2).map(tuple), min_size=1, max_size=4),
    "share": st.sampled_from([0.01, 0.1, 0.3, 0.7, 1.0]),
    "kind": st.sampled_from(["unit", "any", "bit", "constant"]),
    "small": st.booleans(),
}


def read(old: dict[int, np.ndarray]):
    return lambda tensor, box: old[tensor][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(**CASES, level=st.sampled_from([1, 9]))
def test_the_oracle_reads_what_is_written(
    width: int, pick: int, seed: int, shapes: list[tuple[int, ...]], share: float, kind: str, small: bool, level: int
) -> None:
    dtypes = sorted(dtype for dtype, size in ITEMSIZE.items() if size == width)
    dtype = dtypes[pick % len(dtypes)]
    rng = np.random.default_rng(seed)
    old = {t: weights(rng, shape, dtype) for t, shape in enumerate(shapes)}
    new = {t: moved(rng, array, share, kind) for t, array in old.items()}
    changes = [change_of(dtype, old[t], new[t], small=small, tensor=t) for t in old]
    changes = [change for change in changes if change.count]
    if not changes:
        return
    schema = schema_of(*((dtype, shape) for shape in shapes))
    blobs = []
    for yes in (True, False):
        with compiled(yes=yes):
            again = [change_of(dtype, old[c.tensor], new[c.tensor], small=small, tensor=c.tensor) for c in changes]
            packed = Packed().pack(schema, again, level=level)
        blobs.append(bytes(packed.payload["packed"]))
    assert blobs[0] == blobs[1]
    assert packed.stored_bytes == len(blobs[0])
    slices = [(dtype, width, change.count, old[change.tensor].reshape(-1).tolist()) for change in changes]
    found = packed_oracle.decode(blobs[0], slices)
    for change, result in zip(changes, found, strict=True):
        assert result == dict(zip(change.index.tolist(), change.new.tolist(), strict=True))
    check = digest({}, width)
    offset = dict.fromkeys(old, 0)
    for change in changes:
        check += digest(
            dict(zip((change.index + offset[change.tensor]).tolist(), change.old.tolist(), strict=True)), width
        )
    assert blobs[0][:16] == check.to_bytes()
    frame = Frame(
        "packed",
        tuple(Slice(c.tensor, c.box, c.count, c.computed_increment(schema)) for c in changes),
        packed.stored_bytes,
        packed.raw_bytes,
    )
    for yes in (True, False):
        with compiled(yes=yes):
            decoded = decode_frame(schema, frame, {"packed": blobs[0]}, read(old))
        for change, result in zip(changes, decoded, strict=True):
            assert result.index.tolist() == change.index.tolist()
            assert result.new.tolist() == change.new.tolist()
            assert result.old.tolist() == change.old.tolist()


@given(
    seed=st.integers(0, 9999),
    slices=st.lists(
        st.tuples(st.sampled_from(["BF16", "F8_E4M3", "F32", "I64"]), st.integers(1, 60), st.booleans()),
        min_size=2,
        max_size=8,
    ),
)
def test_a_frame_may_mix_widths_and_profiles(seed: int, slices: list[tuple[str, int, bool]]) -> None:
    rng = np.random.default_rng(seed)
    schema = schema_of(*((dtype, (numel,)) for dtype, numel, _ in slices))
    old = {t: weights(rng, (numel,), dtype) for t, (dtype, numel, _) in enumerate(slices)}
    new = {}
    for t, bits in old.items():
        new[t] = moved(rng, bits, 0.3, "unit")
        new[t][0] = ~bits[0]
    blobs = []
    for yes in (True, False):
        with compiled(yes=yes):
            changes = [change_of(d, old[t], new[t], small=small, tensor=t) for t, (d, _, small) in enumerate(slices)]
            packed = Packed().pack(schema, changes, level=1)
        blobs.append(bytes(packed.payload["packed"]))
    assert blobs[0] == blobs[1]
    of_slices = tuple(Slice(c.tensor, c.box, c.count, c.computed_increment(schema)) for c in changes)
    frame = Frame("packed", of_slices, packed.stored_bytes, packed.raw_bytes)
    for yes in (True, False):
        with compiled(yes=yes):
            decoded = list(decode_frame(schema, frame, {"packed": blobs[0]}, read(old)))
        for change, result in zip(changes, decoded, strict=True):
            assert dict(zip(result.index.tolist(), result.new.tolist(), strict=True)) == dict(
                zip(change.index.tolist(), change.new.tolist(), strict=True)
            )


@given(data=st.data())
def test_what_the_oracle_writes_is_read(data: st.DataObject) -> None:
    """Also what our writer never does: any boundary, any mode, compressed streams however small."""
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    dtype = data.draw(st.sampled_from(sorted(ITEMSIZE)))
    width = ITEMSIZE[dtype]
    parts, frames, old_by_tensor = [], [], {}
    for t in range(data.draw(st.integers(1, 3))):
        numel = data.draw(st.sampled_from([1, 7, 300]))
        old = weights(rng, (numel,), dtype)
        new = moved(rng, old, data.draw(st.sampled_from([0.02, 0.5, 1.0])), data.draw(st.sampled_from(["unit", "any"])))
        index = np.flatnonzero(old != new)
        if not index.size:
            index, new = np.array([0]), np.where(np.arange(numel) == 0, old ^ old.dtype.type(1), old)
        has_exponent = dtype in packed_oracle.ORDER
        top = 2 ** packed_oracle.ORDER[dtype][1] - 1 if has_exponent else 0
        boundary = data.draw(st.none() | st.integers(0, top)) if has_exponent else None
        modes = {c: data.draw(st.sampled_from([0, 1, 2, 5, 22, 31])) for c in range(8)}
        changed = {int(i): int(new[i]) for i in index}
        parts.append(packed_oracle.Piece(dtype, width, old.tolist(), changed, boundary, modes))
        old_by_tensor[t] = old
        before = {i: int(old[i]) for i in changed}
        frames.append((changed, before, numel))
    content = packed_oracle.streams(parts)
    check = digest({}, width)
    slices = []
    for t, (changed, before, numel) in enumerate(frames):
        check += digest(before, width)
        slices.append(Slice(t, Box((0,), (numel,)), len(changed), digest(changed, width) - digest(before, width)))
    compressed = tuple(data.draw(st.sets(st.sampled_from(packed_oracle.NAMES))))
    blob = packed_oracle.blob(check.to_bytes(), content, compressed)
    schema = schema_of(*((dtype, (numel,)) for _, _, numel in frames))
    raw = sum(numel for _, _, numel in frames) * width
    frame = Frame("packed", tuple(slices), len(blob), raw)
    for yes in (True, False):
        with compiled(yes=yes):
            decoded = decode_frame(schema, frame, {"packed": blob}, read(old_by_tensor))
        for change, (changed, _, _) in zip(decoded, frames, strict=True):
            assert dict(zip(change.index.tolist(), change.new.tolist(), strict=True)) == changed


def test_the_example_of_the_document() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    block = re.search(r"all streams as they are:\n\n```\n(.*?)```", text, re.DOTALL)[1]
    blob = bytes.fromhex(
        "".join(re.match(r".{15}((?:[0-9a-f]{2} {1,2})*(?:[0-9a-f]{2}\b)?)", line)[1] for line in block.splitlines())
    )
    old = [0x3C00, 0x3F80, 0xBC01, 0, 0x3C7F, 0xBF80, 0x3C02, 0x8000]
    new = {0: 0x3BFF, 2: 0xBC00, 5: 0x3F80, 7: 0}
    assert packed_oracle.decode(blob, [("BF16", 2, 4, old)]) == [new]
    increment = digest(new, 2) - digest({i: old[i] for i in new}, 2)
    frame = Frame("packed", (Slice(0, Box((0,), (8,)), 4, increment),), len(blob), 16)
    [change] = decode_frame(schema_of(("BF16", (8,))), frame, {"packed": blob}, read({0: np.array(old, np.uint16)}))
    assert dict(zip(change.index.tolist(), change.new.tolist(), strict=True)) == new


@given(data=st.data())
def test_the_region_may_be_from_before_or_after(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    dtype = data.draw(st.sampled_from(["BF16", "F32", "F8_E4M3"]))
    old = weights(rng, (30, 40), dtype)
    new = moved(rng, old, 0.2, data.draw(st.sampled_from(["unit", "any"])))
    index = diff(old, new)
    before, after = old.reshape(-1)[index], new.reshape(-1)[index]
    schema, box = schema_of((dtype, old.shape)), Box.whole(old.shape)
    for region in (old, new, np.asfortranarray(new), new.reshape(-1)):
        reduced = reduce_change(dtype, box, index, before, after, region)
        change = Change(tensor=0, box=box, index=index, old=before, new=after, reduced=reduced)
        packed = Packed().pack(schema, [change], level=1)
        slices = [(dtype, ITEMSIZE[dtype], change.count, old.reshape(-1).tolist())]
        [found] = packed_oracle.decode(bytes(packed.payload["packed"]), slices)
        assert found == dict(zip(index.tolist(), after.tolist(), strict=True))


def test_classes_pay_where_small_weights_change_more_often() -> None:
    rng = np.random.default_rng(0)
    old = weights(rng, (1000, 1000), "BF16")
    magnitude = (old & 0x7FFF).astype(np.int64)
    new = np.where(rng.random(old.shape) < 0.3 * 0.5 ** np.maximum((magnitude >> 7) - 114, 0), old + 1, old)
    new = new.astype(np.uint16)
    small, fast = (change_of("BF16", old, new, small=small) for small in (True, False))
    [reduced] = small.reduced
    assert reduced.boundary != NO_CLASSES
    assert reduced.populations.sum() == old.size
    schema = schema_of(("BF16", old.shape))
    sizes = [Packed().pack(schema, [change], level=1).stored_bytes for change in (small, fast)]
    assert sizes[0] < 0.85 * sizes[1]


def test_large_boxes_are_cut() -> None:  # rule P10
    schema = schema_of(("BF16", (3, 3_000_000)), ("U8", (20_000_001,)), ("I64", (1, 1, 1_500_000)))
    rng = np.random.default_rng(0)
    old = {t: random_bits(rng, spec.shape, ITEMSIZE[spec.dtype]) for t, spec in enumerate(schema.tensors)}
    new = {t: touch(rng, array, 0.001) for t, array in old.items()}
    changes = []
    for t, spec in enumerate(schema.tensors):
        changes.append(change_of(spec.dtype, old[t], new[t], small=True, tensor=t))
    part = encode_changes(schema, changes, encodings=("packed",))
    assert max(frame.raw_bytes for frame in part.frames) <= 8 << 20
    assert {frame.encoding for frame in part.frames} == {"packed"}
    result = {t: array.copy() for t, array in old.items()}
    for frame, payload in zip(part.frames, part.payloads, strict=True):
        for change in decode_frame(schema, frame, payload, read(old)):
            region = read(result)(change.tensor, change.box)
            region[np.unravel_index(change.index, region.shape)] = change.new
    assert all(np.array_equal(result[t], new[t]) for t in new)


@given(shape=st.lists(st.integers(1, 9), max_size=4), most=st.integers(1, 40))
def test_pieces_tile_a_box(shape: list[int], most: int) -> None:
    box = Box(tuple(range(len(shape))), tuple(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_delta.codec.packed.pieces.MAX_FRAME_RAW_BYTES", most * 2)
        found = list(pieces(box, 2))
    order = np.arange(box.numel).reshape(shape)
    at = 0
    for piece in found:
        assert piece.start == at
        assert 1 <= piece.box.numel <= most
        window = tuple(
            slice(a - b, a - b + n) for a, b, n in zip(piece.box.offset, box.offset, piece.box.shape, strict=True)
        )
        assert order[window].reshape(-1).tolist() == list(range(at, piece.stop))
        at = piece.stop
    assert at == box.numel


@pytest.mark.parametrize("numel", [2**31, 2**32 + 5])
def test_boxes_of_more_than_2_31_elements(numel: int) -> None:
    """An index per change is all that exists of these tensors; the reader's copy is one element repeated."""
    schema = schema_of(("BF16", (2, numel)))
    box = Box((0, 0), (2, numel))
    at = np.unique(np.concatenate([np.arange(0, 500) * 3, numel + np.arange(0, 500) * 2, [2 * numel - 1]]))
    old, new = np.full(at.size, 7, np.uint16), np.full(at.size, 8, np.uint16)
    change = Change(tensor=0, box=box, index=at, old=old, new=new)
    part = encode_changes(schema, [change], encodings=("packed",))
    decoded = []
    for frame, payload in zip(part.frames, part.payloads, strict=True):
        decoded += decode_frame(schema, frame, payload, lambda _, box: np.broadcast_to(np.uint16(7), box.shape))
    flat = np.concatenate([one.flat_index(schema) for one in decoded])
    assert np.array_equal(np.sort(flat), at)


@given(width=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 99), signed=st.booleans())
def test_steps(width: int, seed: int, signed: bool) -> None:
    old, new = random_bits(np.random.default_rng(seed), (2, 50), width)
    difference = steps(old, new, sign_magnitude=signed)
    assert np.array_equal(stepped(old, difference, sign_magnitude=signed), new)
    for a, b, step in zip(old.tolist(), new.tolist(), difference.tolist(), strict=True):
        s = [packed_oracle.ordered(u, width, signed) for u in (a, b)]
        assert step == (s[1] - s[0]) % (1 << 8 * width)


def test_steps_of_special_values() -> None:
    old = np.array([0x8000, 0x0000, 0x3F80, 0xBF80, 0x7F80], np.uint16)  # -0, 0, 1, -1, inf
    new = np.array([0x0000, 0x8000, 0x3F81, 0xBF7F, 0x7F81], np.uint16)
    assert steps(old, new, sign_magnitude=True).astype(np.int16).tolist() == [1, -1, 1, 1, 1]


def test_fixed_log2() -> None:
    values = np.array([1, 2, 3, 1000, 2**23], np.int64)
    assert np.allclose(fixed_log2(values) / 65536, np.log2(values), atol=0.002)


def test_every_dtype_has_classes_inside_its_width() -> None:
    for dtype, width in ITEMSIZE.items():
        exponent = exponent_of(dtype)
        assert exponent.magnitude < 1 << 8 * width
        documented = packed_oracle.ORDER.get(dtype, (0, 0, False))
        assert (exponent.shift, exponent.num_bits, exponent.sign_magnitude) == documented
