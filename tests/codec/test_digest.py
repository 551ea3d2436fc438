"""The digest of arrays: equal to the definition however it is computed, additive, and blind to nothing we tried."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.oracle import digest, flat_positions, random_bits
from torch_delta.codec import digest as module
from torch_delta.codec.digest import digest_array, digest_box, digest_changes, digest_delta, digest_run
from torch_delta.codec.geometry import Layout
from torch_delta.codec.kernels import DIGEST_CHANGES, DIGEST_DELTA, DIGEST_ROWS
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO, Digest, digest_words

WIDTHS = (1, 2, 4, 8)
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 1025, 2048, 3000]))
STARTS = st.one_of(st.integers(0, 3000), st.sampled_from([2**31 - 1, 2**31, 2**32 + 1, 2**40 - 3]))


@pytest.fixture(params=["numpy", "compiled"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for kernel in (DIGEST_DELTA, *DIGEST_ROWS.values()):
        chosen = kernel.compile() if request.param == "compiled" else None
        assert chosen is not None or request.param == "numpy", "the dev extra installs numba"
        monkeypatch.setattr(kernel, "get", lambda _, chosen=chosen: chosen)
    return request.param


def compiled_rows(words: np.ndarray, *layout: int) -> Digest:
    kernel = DIGEST_ROWS[words.itemsize].compile()
    assert kernel is not None, "the dev extra installs numba"
    return Digest(tuple(map(int, kernel(words, *layout, *module._column_keys()))))


@pytest.mark.parametrize("width", WIDTHS)
@given(size=SIZES, start=STARTS, seed=st.integers(0, 99))
def test_run_equals_the_definition(width: int, size: int, start: int, seed: int) -> None:  # rules D1, D2
    bits = random_bits(np.random.default_rng(seed), (size,), width)
    assert digest_run(bits, start) == digest({start + i: int(w) for i, w in enumerate(bits)}, width)


@pytest.mark.parametrize("width", [1, 2, 4])
@given(
    num_rows=st.integers(1, 5),
    row_length=st.sampled_from([1, 3, 64, 1000, 1024, 1500]),
    start=STARTS,
    gap=st.sampled_from([0, 1, 700, 1024, 10**6]),
    seed=st.integers(0, 99),
)
def test_compiled_rows_equal_numpy(width: int, num_rows: int, row_length: int, start: int, gap: int, seed: int) -> None:
    words = random_bits(np.random.default_rng(seed), (num_rows * row_length,), width)
    layout = (num_rows, row_length, start, row_length + gap)
    assert compiled_rows(words, *layout) == module._rows_numpy(words, *layout)


@given(index=st.lists(st.integers(0, 2**48), max_size=40, unique=True), seed=st.integers(0, 99))
def test_compiled_delta_equals_numpy(index: list[int], seed: int) -> None:
    where = np.array(index, dtype=np.int64)
    delta = np.random.default_rng(seed).integers(0, 2**64, len(index), dtype=np.uint64)
    kernel = DIGEST_DELTA.compile()
    assert kernel is not None
    lanes = kernel(where, delta, *module._column_keys())
    assert Digest(tuple(map(int, lanes))) == module._delta_numpy(where, delta)


def test_known_answer() -> None:
    # The vectors of docs/format.md, from two writers that share nothing.
    assert digest_array(np.array([0x3F80], np.uint16)).hex() == "8048aa418089e1e280b63306acbbc12b"
    assert digest_array(np.array([[1.0], [2.0]]).view(np.uint64)) == digest_words([0, 0x3FF00000, 0, 0x40000000])


@pytest.mark.parametrize("width", WIDTHS)
def test_unaligned_strided_empty_and_scalar_arrays(path: str, width: int) -> None:
    rng = np.random.default_rng(width)
    bits = random_bits(rng, (40, 50), width)
    raw = bytearray(1) + bytearray(bits.tobytes())
    unaligned = np.frombuffer(raw, f"<u{width}", bits.size, 1)
    expected = digest(dict(enumerate(bits.reshape(-1).tolist())), width)
    assert digest_array(bits) == digest_array(unaligned) == compiled(unaligned) == expected
    assert digest_array(np.asfortranarray(bits)) == expected
    assert digest_array(np.repeat(bits, 2, axis=1)[:, ::2]) == expected
    assert digest_array(bits[:0]) == digest_run(bits[0, :0], 7) == ZERO
    assert digest_array(bits[3, 4].reshape(())) == digest({0: int(bits[3, 4])}, width)


def compiled(bits: np.ndarray) -> Digest:
    words = bits.view("<u4") if bits.itemsize == 8 else bits
    return compiled_rows(words, 1, words.size, 0, 0)


@given(data=st.data())
def test_boxes_of_any_mesh_add_up(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    width = data.draw(st.sampled_from(WIDTHS))
    bits = random_bits(np.random.default_rng(data.draw(st.integers(0, 99))), shape, width)
    boxes = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 4))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, max(0, len(shape) - 1)))
        cut = data.draw(st.integers(0, box.shape[dim])) if shape else 0
        for at, extent in ((0, cut), (cut, box.shape[dim] - cut)) if shape else ((0, 0),):
            offset, extents = list(box.offset), list(box.shape)
            if shape:
                offset[dim] += at
                extents[dim] = extent
            boxes.append(Box(tuple(offset), tuple(extents)))
    total = ZERO
    for box in boxes:
        window = bits[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
        part = digest_box(np.asarray(window), box, shape)
        positions = flat_positions(box, shape)
        assert part == digest(dict(zip(positions, np.asarray(window).reshape(-1).tolist(), strict=True)), width)
        total += part
    assert total == digest_array(bits)


def test_a_large_strided_box_is_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    bits = random_bits(rng, (9, 8, 20), 2)
    box = Box((1, 2, 3), (7, 5, 16))
    window = bits[1:8, 2:7, 3:19]
    expected = digest_box(np.ascontiguousarray(window), box, bits.shape)
    for chunk in (1, 10, 33, 200):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        assert digest_box(window, box, bits.shape) == expected


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_update_equals_a_full_pass(path: str, width: int, share: float) -> None:
    rng = np.random.default_rng(width)
    old, new = random_bits(rng, (3000,), width), random_bits(rng, (3000,), width)
    index = np.flatnonzero(rng.random(3000) < share)
    changed = old.copy()
    changed[index] = new[index]
    delta = digest_delta(index, old[index], new[index])
    assert digest_array(old) + delta == digest_array(changed)
    assert digest_delta(index[::-1], old[index][::-1], new[index][::-1]) == delta


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("at", "kind"),
    [(2**31 - 1, np.uint32), (2**31, np.uint32), (2**32 - 1, np.uint32), (2**32 + 1, np.int64), (2**47, np.uint64)],
)
def test_indices_beyond_31_and_32_bits(path: str, at: int, width: int, kind: type) -> None:
    old, new = np.array([3], f"<u{width}"), np.array([200], f"<u{width}")
    expected = digest({at: 200}, width) - digest({at: 3}, width)
    assert digest_delta(np.array([at], kind), old, new) == expected
    assert digest_run(new, at) - digest_run(old, at) == expected


def test_updates_in_chunks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index, old, new = np.arange(5000), np.zeros(5000, np.uint16), np.arange(5000, dtype=np.uint16)
    monkeypatch.setattr(module, "_DELTA_CHUNK", 7)
    assert digest_delta(index, old, new) == digest(dict(enumerate(range(5000))), 2)


def corruptions(rng: np.random.Generator, bits: np.ndarray) -> dict[str, np.ndarray]:
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    i, j = rng.choice(bits.size, 2, replace=False)
    found = {name: bits.copy() for name in ("swap", "flip", "sign", "two signs", "rows", "zero", "-0.0", "shift")}
    found["swap"][[i, j]] = bits[[j, i]]
    found["flip"][i] ^= bits.dtype.type(1 << int(rng.integers(8 * bits.itemsize)))
    found["sign"][i] ^= top
    found["two signs"][[i, j]] ^= top
    found["rows"] = np.roll(bits.reshape(-1, 64), 1, axis=0).reshape(-1)
    found["zero"][:] = 0
    found["-0.0"][:] = top
    found["shift"] = np.roll(bits, 1)
    found["permuted"] = bits[rng.permutation(bits.size)]
    found["reversed"] = bits[::-1].copy()
    found["plus one"] = bits + bits.dtype.type(1)
    found["byte swapped"] = bits.byteswap() if bits.itemsize > 1 else ~bits
    found["block swapped"] = np.concatenate((bits[1024:2048], bits[:1024], bits[2048:]))
    return {name: array for name, array in found.items() if not np.array_equal(array, bits)}


@pytest.mark.parametrize("width", WIDTHS)
def test_corruptions_are_seen(width: int) -> None:
    seen = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        bits = random_bits(rng, (4096,), width)
        for name, array in corruptions(rng, bits).items():
            assert digest_array(array) != digest_array(bits), name
            seen.add(name)
    assert len(seen) == 13


@pytest.mark.parametrize("width", [4, 8])
def test_sign_flips_of_pairs_of_wide_floats(width: int) -> None:
    # The weak spot of a linear digest: a sign bit reaches only the high bits of a lane. Every pair of 512 elements.
    size = 512
    bits = np.zeros(size, f"<u{width}")
    top = bits.dtype.type(1 << (8 * width - 1))
    single = []
    for i in range(size):
        flipped = bits.copy()
        flipped[i] = top
        single.append(digest_array(flipped).lanes)
    assert (0, 0) not in single
    pairs = {((a[0] + b[0]) % 2**64, (a[1] + b[1]) % 2**64) for n, a in enumerate(single) for b in single[:n]}
    assert (0, 0) not in pairs
    assert len(pairs) == size * (size - 1) // 2


def test_bad_arguments() -> None:
    bits = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="bits must be bits, unsigned"):
        digest_array(bits.view(np.float16))
    with pytest.raises(ValueError, match="1-D"):
        digest_run(bits.reshape(2, 2))
    with pytest.raises(ValueError, match="shape"):
        digest_box(bits, Box((1,), (4,)), (4,))
    with pytest.raises(ValueError, match="one dtype"):
        digest_delta(np.arange(4), bits, bits.astype(np.uint32))
    with pytest.raises(ValueError, match="one length"):
        digest_delta(np.arange(3), bits, bits)


@pytest.mark.parametrize("way", ["numpy", "compiled"])
@pytest.mark.parametrize("width", WIDTHS)
@given(
    seed=st.integers(0, 99),
    share=st.sampled_from([0.001, 0.1, 1.0]),
    whole_rows=st.booleans(),
    kind=st.sampled_from(["uint32", "int64"]),
)
def test_changes_of_a_box_before_and_after(
    way: str, width: int, seed: int, share: float, whole_rows: bool, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    full = (int(rng.integers(4, 40)), int(rng.integers(5, 400)))
    box = Box((2, 0 if whole_rows else 3), (full[0] - 3, full[1] if whole_rows else full[1] - 4))
    index = np.flatnonzero(rng.random(box.numel) < share).astype(kind)
    old, new = (random_bits(rng, (index.size,), width) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for kernel in (DIGEST_DELTA, *DIGEST_CHANGES.values()):
            chosen = kernel.compile() if way == "compiled" else None
            patch.setattr(kernel, "get", lambda _, chosen=chosen: chosen)
        got = digest_changes(Layout.of(box, full), index, old, new)
    positions = flat_positions(box, full)
    places = [positions[at] for at in index.tolist()]
    assert got == tuple(digest(dict(zip(places, bits.tolist(), strict=True)), width) for bits in (old, new))
