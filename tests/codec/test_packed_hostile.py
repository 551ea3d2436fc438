"""What a decoder of `packed` frames refuses: literal bad values, another base, flipped bits, lies about sizes."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.codec import packed_oracle
from tests.codec.oracle import digest, schema_of
from tests.codec.packed_oracle import NAMES, varint
from tests.codec.test_packed import change_of, compiled, moved, weights
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.encode import encode_changes
from torch_delta.errors import DigestMismatch, FormatError, TorchDeltaError
from torch_delta.format.box import Box
from torch_delta.format.frames import Frame, Slice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.codec.change import Change

SCHEMA = schema_of(("BF16", (8,)))
OLD = [0x3C00, 0x3F80, 0xBC01, 0, 0x3C7F, 0xBF80, 0x3C02, 0x8000]
NEW = {0: 0x3BFF, 2: 0xBC00, 5: 0x3F80, 7: 0}
PIECE = packed_oracle.Piece("BF16", 2, OLD, NEW, 116, {0: 31, 4: 0, 7: 1})
CHECK = digest({i: OLD[i] for i in NEW}, 2).to_bytes()
INCREMENT = digest(NEW, 2) - digest({i: OLD[i] for i in NEW}, 2)
GOOD = packed_oracle.streams([PIECE])


@pytest.fixture(params=[True, False], ids=["compiled", "reference"], autouse=True)
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    with compiled(yes=request.param):
        yield


def decode(blob: bytes, *, old: list[int] = OLD, count: int = 4, dtype: str = "BF16") -> dict[int, int]:
    frame = Frame("packed", (Slice(0, Box((0,), (8,)), count, INCREMENT),), len(blob), 16)
    bits = np.array(old, np.uint16)
    [change] = decode_frame(schema_of((dtype, (8,))), frame, {"packed": blob}, lambda *_: bits, key="parts/x")
    return dict(zip(change.index.tolist(), change.new.tolist(), strict=True))


def with_streams(**content: bytes) -> bytes:
    return packed_oracle.blob(CHECK, {**GOOD, **content})


def refused(blob: bytes, rule: str, match: str, **options: object) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        decode(blob, **options)
    assert (caught.value.rule, caught.value.key) == (rule, "parts/x")


def test_the_good_one() -> None:
    assert decode(with_streams()) == NEW
    assert decode(packed_oracle.blob(CHECK, GOOD, NAMES)) == NEW


def test_directory() -> None:  # rule E7
    good = with_streams()
    refused(CHECK, "E7", "begins with 16 bytes of base check")
    refused(CHECK[:9], "E7", "begins with 16 bytes of base check")
    refused(CHECK + b"\x18", "E7", "ends inside its directory")
    refused(CHECK + b"\x80\x80\x80\x80\x80\x01" + good[17:], "E7", "too large")
    refused(CHECK + b"\x98\x00" + good[17:], "E7", "longer than needed")
    refused(good[:-1], "E7", "stream 'low' .* has 0 of its 1 bytes")
    refused(good + b"\0", "E7", "1 bytes after the last stream")


def test_sizes_of_streams() -> None:  # rule E7: compared with what the head implies
    refused(with_streams(high0=b"\0"), "E7", "stream 'high0' of a packed frame declares 1 bytes; expected 2")
    refused(with_streams(high=b"\0\0"), "E7", "stream 'high' .* declares 2 bytes; expected 1")
    refused(with_streams(mask=b"\2\0"), "E7", "stream 'mask'")
    refused(with_streams(sign=b""), "E7", "stream 'sign'")
    refused(with_streams(size=b"\xc0\0"), "E7", "stream 'size'")
    refused(with_streams(low=b""), "E7", "stream 'low'")
    refused(with_streams(head=b""), "E7", "stream 'head' .* declares 0 bytes; expected 1 to 74")
    refused(with_streams(head=bytes(75)), "E7", "stream 'head' .* declares 75 bytes")
    refused(with_streams(high_rest=bytes(28)), "E7", "stream 'high_rest' .* declares 28 bytes; expected 0 to 27")
    refused(with_streams(size_rest=bytes(37)), "E7", "stream 'size_rest' .* declares 37 bytes; expected 0 to 36")


def entry(name: str, raw: int, stored: bytes) -> bytes:
    """The good frame with one stream compressed like this."""
    directory, data = b"", b""
    for other in NAMES:
        if other == name:
            directory += varint(2 * raw + 1) + varint(len(stored))
            data += stored
        else:
            directory += varint(2 * len(GOOD[other]))
            data += GOOD[other]
    return CHECK + directory + data


def test_compressed_streams() -> None:  # rule E7
    compress = zstandard.ZstdCompressor().compress
    assert decode(entry("size", 1, compress(GOOD["size"]))) == NEW
    good = compress(GOOD["size"])
    refused(entry("size", 1, b"no zstd"), "E7", "not one whole zstd frame")
    refused(entry("size", 1, b""), "E7", "not one whole zstd frame")
    refused(entry("size", 1, good[:-1]), "E7", "not one whole zstd frame")
    refused(entry("size", 1, good + b"\0"), "E7", "not one whole zstd frame")
    refused(entry("size", 1, compress(b"\xc0\0")), "E7", "not one whole zstd frame that says it holds 1 bytes")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(GOOD["size"])
    refused(entry("size", 1, unsized), "E7", "not one whole zstd frame that says it holds 1 bytes")
    refused(entry("size", 1 << 30, compress(bytes(1 << 20))), "E7", "declares 1073741824 bytes; expected 1")


def test_bombs_cost_nothing() -> None:  # rule E7
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))
    tracemalloc.start()
    for name, raw in (("head", 1 << 27), ("size", 1 << 27), ("size", 1), ("head", 74), ("size_rest", 36)):
        refused(entry(name, raw, bomb), "E7", "stream")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("head", "rule", "match"),
    [
        ("75 01 1f 02 00 00 00 02 00 00 00", "E8", "ends inside a slice"),
        ("75 01 1f 02 00 00 00 02 00 00 00 01 00", "E8", "goes on after its last slice"),
        ("75 05 1f 02", "E8", "5 changed elements in a class, 4 are left"),
        ("75 01 17 00 00 00 02 00 00 00 01", "E8", "mode 23 of a list"),
        ("75 01 1e 00 00 00 02 00 00 00 01", "E8", "mode 30 of a list"),
        ("75 01 1f 00 00 00 00 02 00 00 00 01", "E8", "1 changed elements in a class of 0"),
        ("75 01 1f 09 00 00 00 02 00 00 00 01", "E8", "classes of 9 elements in a box of 8"),
        ("75 01 1f 82 00 00 00 00 02 00 00 00 01", "P5", "longer than needed"),
        ("75 01 1f ff ff ff ff ff ff ff ff ff 01", "P5", r"2\*\*63 or more"),
        ("75 01", "E8", "ends inside a slice"),
    ],
)
def test_heads(head: str, rule: str, match: str) -> None:  # rules E8 and P5
    refused(with_streams(head=bytes.fromhex(head)), rule, match)


def test_boundaries() -> None:  # rule E8
    head = bytes.fromhex("8102 01 1f 02 00 00 00 02 00 00 00 01")
    refused(with_streams(head=head), "E8", "classes begin at exponent 256, BF16 has 256")
    for dtype in ("I16", "U16"):
        refused(with_streams(), "E8", f"classes begin at exponent 116, {dtype} has 1", dtype=dtype)
    refused(with_streams(head=bytes.fromhex("21") + GOOD["head"][1:]), "E8", "F16 has 32", dtype="F16")


def test_numbers() -> None:  # rule E9
    refused(with_streams(size_rest=bytes.fromhex("fd fd")), "E9", "cut off, longer than needed")
    refused(with_streams(size_rest=bytes.fromhex("fd fd 81 00")), "E9", "longer than needed")
    refused(with_streams(size_rest=b"\x80" * 9 + b"\x01"), "E9", "too large")
    refused(with_streams(size_rest=b""), "E9", "stream 'size_rest' holds 0 numbers, 1 are needed")
    refused(with_streams(size_rest=b"\0\0"), "E9", "stream 'size_rest' holds 2 numbers, 1 are needed")
    refused(with_streams(high_rest=b"\0"), "E9", "stream 'high_rest' holds 1 numbers, 0 are needed")
    refused(with_streams(high=b"\xff"), "E9", "stream 'high_rest' holds 0 numbers, 1 are needed")
    refused(with_streams(size_rest=varint(2**15 - 3)), "E9", "out of range")  # excess 2**15: no step of 16 bits
    refused(with_streams(size_rest=varint(2**63 - 1)), "E9", "out of range")


def test_ranks() -> None:  # rule E9: inside the box is checked first, then inside the class (rule E6)
    refused(with_streams(high=b"\x04"), "E9", "out of range")  # gap 9 in a box of 8
    for content in ({"high0": b"\0\3"}, {"high0": b"\4\0"}, {"high": b"\1"}):
        with pytest.raises(DigestMismatch, match="other numbers of elements by exponent") as caught:
            decode(with_streams(**content))
        assert caught.value.tensor == "t000"
    one = packed_oracle.Piece("BF16", 2, OLD, NEW, None, {0: 0})
    content = packed_oracle.streams([one])
    assert decode(packed_oracle.blob(CHECK, content)) == NEW
    refused(packed_oracle.blob(CHECK, {**content, "high0": b"\0\1\2\2"}), "E9", "outside its box of 8")
    huge = {**content, "high0": b"\0\1\2\xff", "high_rest": varint(2**63 - 1)}
    refused(packed_oracle.blob(CHECK, huge), "E9", "out of range")


def test_masks() -> None:  # rule E9
    refused(with_streams(mask=b"\3"), "E9", "out of range")
    refused(with_streams(mask=b"\0"), "E9", "out of range")
    one = packed_oracle.streams([packed_oracle.Piece("BF16", 2, OLD, NEW, None, {})])
    assert decode(packed_oracle.blob(CHECK, one)) == NEW
    short = {**one, "head": b"\0\x1f\x07", "mask": b"\x65"}  # as many ones, in seven bits
    refused(packed_oracle.blob(CHECK, short), "E9", "box of 8")


def test_padding() -> None:  # rule E9
    for name in ("mask", "sign", "low"):
        refused(with_streams(**{name: bytes([GOOD[name][0] | 128])}), "E9", f"behind the last one of stream '{name}'")
    three = packed_oracle.Piece("BF16", 2, OLD, {i: NEW[i] for i in (0, 2, 7)}, 116, {0: 31, 4: 0})
    content = packed_oracle.streams([three])
    content["size"] = bytes([content["size"][0] | 64])
    refused(packed_oracle.blob(CHECK, content), "E9", "behind the last one of stream 'size'", count=3)


@pytest.mark.parametrize("element", sorted(NEW))
@pytest.mark.parametrize("bit", range(16))
def test_any_wrong_bit_of_the_base_at_a_changed_element(element: int, bit: int) -> None:  # rules E5 and E6
    old = OLD.copy()
    old[element] ^= 1 << bit
    with pytest.raises(DigestMismatch) as caught:
        decode(with_streams(), old=old)
    assert caught.value.tensor == "t000"
    assert caught.value.action == "resync"


def test_a_wrong_base_check() -> None:  # rule E6
    for byte in range(16):
        blob = bytearray(with_streams())
        blob[byte] ^= 1
        with pytest.raises(DigestMismatch, match="base check"):
            decode(bytes(blob))


def large() -> tuple[Frame, bytes, np.ndarray, Change]:
    """A frame of our own writer with every kind of list and stream."""
    rng = np.random.default_rng(0)
    old = weights(rng, (3000,), "BF16")
    new = moved(rng, moved(rng, old, 0.15, "unit"), 0.01, "any")
    new[old & 0x7FFF < 0x3B00] ^= 1
    change = change_of("BF16", old, new, small=True)
    part = encode_changes(schema_of(("BF16", (3000,))), [change], encodings=("packed",))
    return part.frames[0], bytes(part.payloads[0]["packed"]), old, change


FRAME, BLOB, BASE, CHANGE = large()


@given(position=st.integers(0, 10**6), flip=st.integers(1, 255), cut=st.integers(0, 3))
def test_damage_is_refused_or_changes_nothing(position: int, flip: int, cut: int) -> None:
    damaged = bytearray(BLOB)
    damaged[position % len(BLOB)] ^= flip
    damaged = damaged[: len(damaged) - cut]
    frame = Frame("packed", FRAME.slices, len(damaged), FRAME.raw_bytes)
    try:
        [change] = decode_frame(schema_of(("BF16", (3000,))), frame, {"packed": bytes(damaged)}, lambda *_: BASE)
    except (FormatError, DigestMismatch):
        return
    # zstd headers have bits that mean nothing to the content; the result is then still right.
    assert change.index.tolist() == CHANGE.index.tolist()
    assert change.new.tolist() == CHANGE.new.tolist()


@given(content=st.binary(max_size=200), count=st.integers(1, 8))
def test_noise_is_refused(content: bytes, count: int) -> None:
    with pytest.raises(TorchDeltaError):
        decode(CHECK + content, count=count)


@given(stream=st.sampled_from(NAMES), content=st.binary(max_size=12))
def test_any_stream_replaced_by_noise_is_refused(stream: str, content: bytes) -> None:
    if content == GOOD[stream]:
        return
    with pytest.raises(TorchDeltaError):
        decode(with_streams(**{stream: content}))


@given(seed=st.integers(0, 999))
def test_another_base_is_refused(seed: int) -> None:  # rule E6
    rng = np.random.default_rng(seed)
    other = BASE.copy()
    where = rng.choice(CHANGE.index, 1)
    other[where] ^= np.uint16(1 << rng.integers(16))
    with pytest.raises(DigestMismatch):
        decode_frame(schema_of(("BF16", (3000,))), FRAME, {"packed": BLOB}, lambda *_: other)
