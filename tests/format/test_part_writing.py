"""Parts as they are written: literal bytes, payload passed through, and what comes back."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.format import Box, Digest, Frame, PartHeader, Schema, Slice, TensorSpec, encode_part
from torch_delta.format import parse_part as parse

ID = "0" * 32
HEADER = PartHeader(stream_id=ID, version=7, rank=1, seq=0)
KEY = "parts/00000000000000000007/00001-0000-0123456789abcdef.safetensors"


def encode(frames, payloads, schema) -> bytes:
    return b"".join(encode_part(HEADER, frames, payloads, schema=schema))


def test_written_bytes(schema) -> None:
    frames = [Frame("coo", (Slice(3, Box((2, 0), (2, 2)), 1, Digest((0, 0))),))]
    data = encode(frames, [{"coo.value.BF16": b"\xa1\x40", "coo.index.u32": b"\x03\0\0\0"}], schema)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert json.loads(header.pop("__metadata__")["torch_delta"]) == {
        "format_version": [1, 0],
        "stream_id": ID,
        "version": 7,
        "rank": 1,
        "seq": 0,
    }
    assert list(header) == ["increment", "coo.index.u32", "coo.value.BF16", "table"]
    assert data[8 + length :] == bytes(16) + b"\x03\0\0\0" + b"\xa1\x40" + bytes([1, 1, 1, 3 * 4 + 1, 2, 2, 1])
    assert length % 8 == 0


def test_payload_is_passed_through_uncopied(schema) -> None:
    values = memoryview(bytearray(16)).cast("H")
    frames = [Frame("dense", (Slice(3, Box.whole((4, 2)), 8, Digest((0, 0))),))]
    chunks = encode_part(HEADER, frames, [{"dense.BF16": values}], schema=schema)
    before = b"".join(chunks)
    values[0] = 0x1234
    after = b"".join(chunks)
    assert before.count(b"\x34\x12") == 0
    assert after.count(b"\x34\x12") == 1
    assert len(after) == sum(map(len, chunks))


def test_empty_part(schema) -> None:
    data = encode([], [], schema)
    part = parse(data, schema=schema, key=KEY)
    assert (part.frames, part.num_slices, part.num_changed) == ((), 0, 0)


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"coo.index.u32": bytes(4)},
        {"coo.index.u32": bytes(4), "coo.value.BF16": bytes(4)},
        {"coo.index.u64": bytes(8), "coo.value.BF16": bytes(2)},
        {"coo.index.u32": bytes(4), "coo.value.BF16": bytes(2), "xor": b"x"},
    ],
)
def test_payload_of_another_size(payload, schema, refuses) -> None:  # rule P3
    frames = [Frame("coo", (Slice(3, Box((2, 0), (2, 2)), 1, Digest((0, 0))),))]
    with refuses("P3"):
        encode(frames, [payload], schema)


def test_bad_parts_are_not_written(schema, refuses) -> None:
    item = Slice(3, Box((2, 0), (2, 2)), 4, Digest((0, 0)))
    frames, payload = [Frame("dense", (item,))], {"dense.BF16": bytes(8)}
    with refuses("P4"):
        encode_part(replace(HEADER, version=0), frames, [payload], schema=schema)
    with refuses("P1"):
        encode(frames * 2, [payload] * 2, schema)
    with pytest.raises(ValueError, match="zip"):
        encode(frames, [], schema)


@given(st.data())
def test_parts_come_back(data) -> None:
    """Frames of several encodings and dtypes; each gets back exactly its own bytes."""
    dtypes = ["I8", "BF16", "F32", "I64"]
    width = dict(zip(dtypes, (1, 2, 4, 8), strict=True))
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(dtypes), st.integers(1, 40)), min_size=1, max_size=6))
    schema = Schema(tuple(TensorSpec(f"t{at}", dtype, (numel,)) for at, (dtype, numel) in enumerate(drawn)))
    frames, payloads = [], []
    tensors = list(range(len(drawn)))
    while tensors:
        group, tensors = tensors[: (size := data.draw(st.integers(1, len(tensors))))], tensors[size:]
        encoding = data.draw(st.sampled_from(["coo", "xor", "dense"]))
        slices, payload, raw = [], {}, 0
        for at in group:
            dtype, numel = drawn[at]
            count = numel if encoding == "dense" else data.draw(st.integers(1, numel))
            slices.append(Slice(at, Box((0,), (numel,)), count, Digest((at, 0))))
            raw += numel * width[dtype]
            if encoding == "coo":
                payload["coo.index.u32"] = payload.get("coo.index.u32", b"") + bytes([at]) * 4 * count
            if encoding != "xor":
                name = f"{'coo.value' if encoding == 'coo' else 'dense'}.{dtype}"
                payload[name] = payload.get(name, b"") + bytes([at + 100]) * width[dtype] * count
        if encoding == "xor":
            payload["xor"] = data.draw(st.binary(min_size=1, max_size=30))
        sizes = (len(payload["xor"]), raw) if encoding == "xor" else (0, 0)
        frames.append(Frame(encoding, tuple(slices), *sizes))
        payloads.append(payload)
    part = parse(encode(frames, payloads, schema), schema=schema, key=KEY)
    assert [frame.slices for frame in part.frames] == [frame.slices for frame in frames]
    assert [{k: bytes(v) for k, v in part.payload(frame).items()} for frame in part.frames] == payloads
