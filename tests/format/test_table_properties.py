"""The slice table: whatever is written comes back, whatever is read could have been written, and it is fast enough."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from torch_delta.errors import FormatError
from torch_delta.format import Box, Digest, Frame, Schema, Slice, TensorSpec, check_slices_disjoint
from torch_delta.format.table import decode_table, decode_varints, encode_table, encode_varint


@given(st.lists(st.integers(0, 2**63 - 1), max_size=20))
def test_varints_come_back(values) -> None:
    assert decode_varints(b"".join(map(encode_varint, values)), key="p") == values


@st.composite
def frames_of(draw) -> tuple[Schema, list[Frame]]:
    shapes = draw(st.lists(st.lists(st.integers(1, 300), max_size=3), min_size=1, max_size=4))
    schema = Schema(tuple(TensorSpec(f"t{at}", "BF16", tuple(shape)) for at, shape in enumerate(shapes)))
    frames = []
    for encoding in draw(st.lists(st.sampled_from(["coo", "xor", "dense"]), max_size=4)):
        slices = {}
        for _ in range(draw(st.integers(1, 4))):
            tensor = draw(st.integers(0, len(shapes) - 1))
            offset = tuple(draw(st.integers(0, full - 1)) for full in shapes[tensor])
            extent = tuple(draw(st.integers(1, full - at)) for full, at in zip(shapes[tensor], offset, strict=True))
            box = Box(offset, extent)
            count = box.numel if encoding == "dense" else draw(st.integers(1, box.numel))
            lanes = draw(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)))
            slices[tensor, offset] = Slice(tensor, box, count, Digest(lanes))
        ordered = tuple(slices[place] for place in sorted(slices))
        raw = sum(2 * item.box.numel for item in ordered) if encoding == "xor" else 0
        if raw > 8 << 20:
            continue
        frames.append(Frame(encoding, ordered, draw(st.integers(1, 2**60)) if raw else 0, raw))
    return schema, frames


@given(frames_of())
def test_tables_come_back(drawn) -> None:
    schema, frames = drawn
    table, increment = encode_table(frames, schema=schema, key="p")
    found = decode_table(memoryview(table), memoryview(increment), schema=schema, key="p")
    assert [(f.encoding, f.slices, f.stored_bytes, f.raw_bytes) for f in found] == [
        (f.encoding, f.slices, f.stored_bytes, f.raw_bytes) for f in frames
    ]


@given(st.binary(max_size=60), st.integers(0, 6))
def test_any_table_is_read_or_refused(data, num_slices) -> None:
    schema = Schema((TensorSpec("a", "F32", (3,)), TensorSpec("b", "I8", (2, 3, 4)), TensorSpec("c", "I64", ())))
    increment = bytes(16 * num_slices)
    try:
        frames = decode_table(data, increment, schema=schema, key="p")
    except FormatError:
        return
    # There is one way to write a table.
    assert encode_table(frames, schema=schema, key="p") == (data, increment)


def test_many_slices_are_fast() -> None:
    generator = random.Random(0)
    schema = Schema(tuple(TensorSpec(f"t{at:06}", "BF16", (768, 2048)) for at in range(25_000)))
    slices = [
        Slice(at // 4, Box((at % 4 * 192, 0), (192, 2048)), generator.randrange(1, 9000), Digest((at, at)))
        for at in range(100_000)
    ]
    frames = [Frame("coo", tuple(slices[at : at + 500])) for at in range(0, len(slices), 500)]
    started_s = time.perf_counter()
    table, increment = encode_table(frames, schema=schema, key="p")
    check_slices_disjoint([decode_table(table, increment, schema=schema, key="p")], schema=schema)
    assert time.perf_counter() - started_s < 15  # 1.1 s on two old cores; the bound only catches a quadratic loop
    assert len(table) < 8 * len(slices)
