"""What a decoder refuses, each with a literal bad value: nothing wrong is ever returned."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.oracle import digest, random_bits, schema_of
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.zstd import Inflater, frame_bytes
from torch_delta.errors import BaseMismatch, DigestMismatch, FormatError, TorchDeltaError
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO, Digest
from torch_delta.format.frames import Frame, Slice

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = schema_of(("BF16", (2, 4)), ("F32", (3,)))
OLD = {
    0: np.array([[0x3F80, 0, 0x8000, 0x7FC0], [0x4000, 0x4040, 0x4080, 0x40A0]], np.uint16),
    1: np.array([0x3F800000, 5, 6], np.uint32),
}
INDEX, NEW = [1, 6], [0x8000, 0x4081]
INCREMENT = digest(dict(zip(INDEX, NEW, strict=True)), 2) - digest({1: 0, 6: 0x4080}, 2)
BOX = Box((0, 0), (2, 4))
SLICE = Slice(0, BOX, 2, INCREMENT)
XOR = struct.pack("<8H", 0, 0x8000, 0, 0, 0, 0, 1, 0)
CHECK = digest({1: 0, 6: 0x4080}, 2).to_bytes()


def read_old(tensor: int, box: Box) -> np.ndarray:
    assert box.fits(OLD[tensor].shape)
    return OLD[tensor][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]


def zstd(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def coo(index: list[int] = INDEX, new: list[int] = NEW, item: Slice = SLICE) -> tuple[Frame, dict[str, bytes]]:
    payload = {"coo.index.u32": struct.pack(f"<{len(index)}I", *index)}
    payload["coo.value.BF16"] = struct.pack(f"<{len(new)}H", *new)
    return Frame("coo", (item,)), payload


def xor(blob: bytes = CHECK + zstd(XOR), item: Slice = SLICE, raw: int = 16) -> tuple[Frame, dict[str, bytes]]:
    return Frame("xor", (item,), len(blob), raw), {"xor": blob}


def dense(new: list[int], increment: Digest) -> tuple[Frame, dict[str, bytes]]:
    return Frame("dense", (Slice(0, BOX, 8, increment),)), {"dense.BF16": struct.pack("<8H", *new)}


WHOLE = [0x3F80, 0x8000, 0x8000, 0x7FC0, 0x4000, 0x4040, 0x4081, 0x40A0]


@pytest.mark.parametrize("made", [coo(), xor(), dense(WHOLE, INCREMENT)])
def test_the_good_one(made: tuple[Frame, dict[str, bytes]]) -> None:
    before = OLD[0].copy()
    [change] = decode_frame(SCHEMA, *made, read_old)
    flat = OLD[0].copy().reshape(-1)
    flat[change.positions()] = change.new
    assert flat.tolist() == WHOLE
    assert change.increment == INCREMENT
    assert change.old.tolist() == before.reshape(-1)[change.positions()].tolist()
    assert np.array_equal(OLD[0], before)


def refused(made: tuple[Frame, dict[str, bytes]], error: type[TorchDeltaError], match: str, **facts: object) -> None:
    with pytest.raises(error, match=match) as caught:
        decode_frame(SCHEMA, *made, read_old, key="parts/x")
    for name, value in facts.items():
        assert getattr(caught.value, name) == value


def test_indices() -> None:  # rule E1; F65
    refused(coo([6, 1]), FormatError, "1 follows 6", rule="E1", tensor="t000", key="parts/x")
    refused(coo([1, 1]), FormatError, "1 follows 1", rule="E1")
    refused(coo([1, 8]), FormatError, "index 8 of 't000' is outside its box of 8", rule="E1", got=8, expected=8)
    refused(coo([1, 2**32 - 1]), FormatError, "outside", rule="E1")


def test_indices_of_64_bits() -> None:  # rules E1, E2: also what is negative as int64
    schema = schema_of(("BF16", (2**32 + 1,)))
    box = Box((0,), (2**32 + 1,))
    for at in (2**32 + 1, 2**63, 2**64 - 1):
        frame = Frame("coo", (Slice(0, box, 1, ZERO),))
        payload = {"coo.index.u64": struct.pack("<Q", at), "coo.value.BF16": bytes(2)}
        with pytest.raises(FormatError, match="outside its box") as caught:
            decode_frame(schema, frame, payload, lambda _, box: np.broadcast_to(np.uint16(0), box.shape))
        assert caught.value.rule == "E1"


def test_payload_sizes() -> None:  # rule P3
    frame, payload = coo()
    for wrong in (
        {**payload, "coo.value.BF16": bytes(6)},
        {**payload, "coo.index.u32": bytes(4)},
        {"coo.index.u64": bytes(16), "coo.value.BF16": bytes(4)},
        {"coo.index.u32": payload["coo.index.u32"]},
        {},
    ):
        refused((frame, wrong), FormatError, "needs payload bytes", rule="P3")
    refused((xor()[0], {"xor": b"x"}), FormatError, "needs payload bytes", rule="P3")


def test_the_frame_itself_is_checked() -> None:  # rules P7 to P10; F59, F22
    frame, payload = coo()
    refused((replace(frame, slices=(replace(SLICE, tensor=9),)), payload), FormatError, "slice of tensor 9", rule="P7")
    outside = replace(SLICE, box=Box((1, 0), (2, 4)))
    refused((replace(frame, slices=(outside,)), payload), FormatError, "outside", rule="P8")
    refused((replace(frame, slices=(replace(SLICE, count=9),)), payload), FormatError, "count 9", rule="P9")
    refused(xor(raw=2**40), FormatError, "decodes to the 16 bytes of its boxes", rule="P10")
    refused((Frame("packed", (SLICE,), 9, 9), {"packed": bytes(9)}), FormatError, "about the 16 bytes", rule="P10")
    refused((Frame("rank", (SLICE,), 9, 9), {"rank": bytes(9)}), FormatError, "unknown encoding 'rank'", rule="P12")


def test_xor_payload() -> None:  # rule E3
    body = zstd(XOR)
    cases: dict[bytes, str] = {
        CHECK: "begins with 16 bytes of base check",
        CHECK[:7]: "begins with 16 bytes",
        CHECK + b"not zstd": "cut off or no zstd frame",
        CHECK + body[:-1]: "cut off or no zstd frame",
        CHECK + body + b"\0": f"ends after {len(body)} bytes",
        CHECK + body + zstd(b""): f"ends after {len(body)} bytes",
        CHECK + zstd(XOR[:-2]): "decodes to 14 bytes, fewer",
        CHECK + zstd(b""): "decodes to 0 bytes, fewer",
        CHECK + zstd(XOR + b"\0"): "more than its 16 raw bytes",
    }
    for blob, message in cases.items():
        refused(xor(blob), FormatError, message, rule="E3")
    bomb = CHECK + zstd(XOR + bytes(1 << 28))
    tracemalloc.start()
    refused(xor(bomb), FormatError, "more than its 16 raw bytes", rule="E3")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_window_beyond_the_limit() -> None:  # rule E3: memory does not depend on what the frame says
    params = zstandard.ZstdCompressionParameters.from_level(1, window_log=25)
    stream = zstandard.ZstdCompressor(compression_params=params).compressobj()
    body = stream.compress(XOR) + stream.flush()
    assert zstandard.get_frame_parameters(body).window_size == 1 << 25
    refused(xor(CHECK + body), FormatError, "damaged zstd frame", rule="E3")


def test_a_frame_that_does_not_state_its_size() -> None:
    stream = zstandard.ZstdCompressor(level=5, write_checksum=True).compressobj()
    body = stream.compress(XOR) + stream.flush()
    [change] = decode_frame(SCHEMA, *xor(CHECK + body), read_old)
    assert change.new.tolist() == NEW


def test_counts() -> None:  # rule E4
    for count, found in ((1, "more than 1 elements"), (3, "2 elements")):
        made = xor(item=replace(SLICE, count=count))
        refused(made, FormatError, f"{found} of 't000' change, not the {count}", rule="E4", expected=count)
    noise = CHECK + zstd(struct.pack("<8H", *[1] * 8))
    refused(xor(noise), FormatError, "more than 2 elements", rule="E4", got=8)


def test_wrong_value_or_increment() -> None:  # rule E5
    facts = {"tensor": "t000", "expected": INCREMENT.hex(), "box": BOX, "key": "parts/x"}
    refused(coo(new=[0x8000, 0x4082]), DigestMismatch, "adds .* to its digest, the writer says", **facts)
    refused(coo(index=[0, 6]), DigestMismatch, "nothing was written", **facts)
    flipped = struct.pack("<8H", 0, 0x8000, 0, 0, 0, 0, 3, 0)
    refused(xor(CHECK + zstd(flipped)), DigestMismatch, "the writer says", **facts)
    moved = struct.pack("<8H", 0, 0x8000, 0, 0, 0, 1, 0, 0)
    refused(xor(CHECK + zstd(moved)), DigestMismatch, "base check")
    refused(dense([*WHOLE[:7], 0x40A1], INCREMENT), DigestMismatch, "the writer says", **facts)
    off = Digest((INCREMENT.lanes[0], INCREMENT.lanes[1] ^ 1))
    for made in (coo(item=replace(SLICE, increment=off)), xor(item=replace(SLICE, increment=off)), dense(WHOLE, off)):
        refused(made, DigestMismatch, "the writer says", expected=off.hex(), got=INCREMENT.hex())
    assert DigestMismatch("x").action == "resync"


@pytest.mark.parametrize("make", [coo, xor, lambda: dense(WHOLE, INCREMENT)])
@pytest.mark.parametrize("bit", range(16))
@pytest.mark.parametrize("element", INDEX)
def test_any_wrong_bit_of_the_base_at_a_changed_element(
    make: Callable[[], tuple[Frame, dict[str, bytes]]], element: int, bit: int
) -> None:  # rules E5 and E6: also the bits an xor leaves alone, which its increment cannot see
    def rotten(_: int, box: Box) -> np.ndarray:
        bits = OLD[0].copy()
        bits.reshape(-1)[element] ^= np.uint16(1 << bit)
        return bits

    with pytest.raises(DigestMismatch) as caught:
        decode_frame(SCHEMA, *make(), rotten)
    assert caught.value.tensor == "t000"


def test_another_base_altogether() -> None:
    rng = np.random.default_rng(0)
    for make in (coo, xor, lambda: dense(WHOLE, INCREMENT)):
        with pytest.raises(DigestMismatch):
            decode_frame(SCHEMA, *make(), lambda _, box: random_bits(rng, box.shape, 2))


@pytest.mark.parametrize(
    "bits",
    [np.zeros((2, 4), np.uint32), np.zeros((2, 4), np.float16), np.zeros((4, 2), np.uint16), np.zeros(8, np.uint16)],
)
def test_a_local_tensor_of_another_kind(bits: np.ndarray) -> None:  # F22, F59
    for make in (coo, xor, lambda: dense(WHOLE, INCREMENT)):
        with pytest.raises(BaseMismatch, match="t000: the bits here are") as caught:
            decode_frame(SCHEMA, *make(), lambda *_: bits)
        assert caught.value.tensors == ["t000"]


def test_one_bad_slice_spoils_the_frame() -> None:
    other = Slice(1, Box((0,), (3,)), 1, digest({1: 9}, 4) - digest({1: 5}, 4))
    frame = Frame("coo", (SLICE, other))
    payload = {
        "coo.index.u32": struct.pack("<3I", 1, 6, 1),
        "coo.value.BF16": struct.pack("<2H", *NEW),
        "coo.value.F32": struct.pack("<I", 9),
    }
    assert [c.count for c in decode_frame(SCHEMA, frame, payload, read_old)] == [2, 1]
    refused((frame, {**payload, "coo.value.F32": struct.pack("<I", 8)}), DigestMismatch, "t001", tensor="t001")


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7), encoding=st.sampled_from(["coo", "xor", "dense"]))
def test_no_flipped_bit_of_a_payload_is_accepted(position: int, bit: int, encoding: str) -> None:
    make = {"coo": coo, "xor": xor, "dense": lambda: dense(WHOLE, INCREMENT)}[encoding]
    frame, payload = make()
    name = sorted(payload)[position % len(payload)]
    data = bytearray(payload[name])
    data[position % len(data)] ^= 1 << bit
    try:
        [change] = decode_frame(SCHEMA, frame, {**payload, name: bytes(data)}, read_old)
    except (FormatError, DigestMismatch):
        return
    # zstd headers have bits that mean nothing to the content; the result is then still right.
    assert encoding == "xor"
    assert (change.index.tolist(), change.new.tolist()) == (INDEX, NEW)


@given(data=st.binary(max_size=3000), level=st.integers(1, 19), checksum=st.booleans(), sized=st.booleans())
def test_zstd_frames_are_measured_exactly(data: bytes, level: int, checksum: bool, sized: bool) -> None:
    data *= 50
    options = {"level": level, "write_checksum": checksum, "write_content_size": sized}
    stored = zstd(data, **options)
    assert frame_bytes(memoryview(stored)) == len(stored)
    assert frame_bytes(memoryview(stored + b"rest")) == len(stored)
    assert all(frame_bytes(memoryview(stored[:cut])) is None for cut in (0, 3, 4, 5, len(stored) // 2, len(stored) - 1))
    inflater = Inflater(memoryview(stored), key="k")
    target = np.empty(len(data), np.uint8)
    for at in range(0, len(data), 1000):
        inflater.fill(target[at : at + 1000])
    inflater.finish()
    assert target.tobytes() == data
