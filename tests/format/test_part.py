"""Parts as files: layout, payload, and everything a header can lie about."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.errors import FormatError
from torch_delta.format import Box, Commit, Digest, Frame, PartHeader, PartRef, Schema, Slice, TensorSpec
from torch_delta.format import parse_part as parse

ID, HASH = "0" * 32, "ab" * 32
HEADER = PartHeader(stream_id=ID, version=7, rank=1, seq=0)
KEY = "parts/00000000000000000007/00001-0000-0123456789abcdef.safetensors"
META = {"format_version": [1, 0], "stream_id": ID, "version": 7, "rank": 1, "seq": 0}
# One coo slice of tensor 3 (w, BF16 [4,2]), rows 2 and 3, one element: index 3 becomes 40a1.
TABLE = bytes([1, 1, 1, 3 * 4 + 1, 2, 2, 1])
TENSORS = {
    "increment": ("U64", [1, 2], bytes(16)),
    "coo.index.u32": ("U32", [1], b"\x03\0\0\0"),
    "coo.value.BF16": ("BF16", [1], b"\xa1\x40"),
    "table": ("U8", [7], TABLE),
}


def build(tensors=None, meta=META, *, header=None, pad=b" ", **offsets) -> bytes:
    """A safetensors file by hand; `header` replaces the JSON, `offsets` the data_offsets of tensors (dots as _)."""
    entries, data = {"__metadata__": {"torch_delta": meta if isinstance(meta, str) else json.dumps(meta)}}, b""
    for name, (dtype, shape, raw) in (TENSORS if tensors is None else tensors).items():
        span = offsets.get(name.replace(".", "_"), [len(data), len(data) + len(raw)])
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        data += raw
    text = json.dumps(entries).encode() if header is None else header
    text += pad * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def test_the_file_of_the_example(schema) -> None:
    part = parse(build(), schema=schema, key=KEY)
    assert part.header == HEADER
    (frame,) = part.frames
    assert frame.slices == (Slice(3, Box((2, 0), (2, 2)), 1, Digest((0, 0))),)
    assert {name: bytes(view) for name, view in part.payload(frame).items()} == {
        "coo.index.u32": b"\x03\0\0\0",
        "coo.value.BF16": b"\xa1\x40",
    }
    assert (part.num_slices, part.num_changed) == (1, 1)
    with pytest.raises(KeyError):
        part.payload(Frame("coo", frame.slices))


def test_unknown_metadata_is_ignored(schema) -> None:  # rule J6
    later = META | {"later": [1], "format_version": [1, 3]}
    assert parse(build(meta=later), schema=schema, key=KEY).header == HEADER


def test_views_are_not_copies(schema) -> None:
    buffer = bytearray(build())
    part = parse(buffer, schema=schema, key=KEY)
    buffer[buffer.index(b"\xa1\x40")] = 0xA2
    assert bytes(part.payload(part.frames[0])["coo.value.BF16"]) == b"\xa2\x40"


@pytest.mark.parametrize(
    ("tensors", "offsets"),
    [
        (None, {"table": [22, 30]}),
        (None, {"table": [22, 2**53 - 1]}),
        (None, {"coo_index_u32": [0, 4]}),
        (None, {"coo_value_BF16": [18, 20]}),
        (None, {"table": [21, 28]}),
        (None, {"increment": [16, 0]}),
        (None, {"increment": [0]}),
        (None, {"increment": [0, 16, 16]}),
        (None, {"increment": [-16, 0]}),
        (None, {"increment": ["0", "16"]}),
        (None, {"increment": [False, 16]}),
        (None, {"increment": {}}),
        (TENSORS | {"table": ("U8", [8], TABLE)}, {}),
        (TENSORS | {"table": ("U8", [2**50, 2**50], TABLE)}, {}),
        (TENSORS | {"table": ("U8", [-7], TABLE)}, {}),
        (TENSORS | {"table": ("U8", [1] * 17, TABLE)}, {}),
        (TENSORS | {"table": ("Q8", [7], TABLE)}, {}),
        (TENSORS | {"table": (8, [7], TABLE)}, {}),
        (TENSORS | {"table": ("U8", 7, TABLE)}, {}),
        ({"table": TENSORS["table"]} | TENSORS | {"increment": ("U64", [1, 2], bytes(16))}, {}),
    ],
)
def test_layout_of_the_data(tensors, offsets, schema, refuses) -> None:  # rule P2
    with refuses("P2"):
        parse(build(tensors, **offsets), schema=schema, key=KEY)


def test_data_that_no_tensor_names(schema, refuses) -> None:  # rule P2
    with refuses("P2", match="data"):
        parse(build() + b"\0", schema=schema, key=KEY)
    for cut in (1, 7, 20):
        with refuses("P2"):
            parse(build()[:-cut], schema=schema, key=KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"other": ("U8", [1], b"x")},
        {"other": ("U8", [0], b"")},
        {"dense.I8": ("I8", [0], b"")},
        {"xor": ("U8", [1], b"x")},
        {"coo.index.u32": ("U32", [2], bytes(8))},
        {"coo.index.u32": ("I32", [1], bytes(4))},
        {"coo.value.BF16": ("F16", [1], bytes(2))},
        {"coo.value.BF16": ("BF16", [0], b"")},
        {"table": ("I8", [7], TABLE)},
        {"increment": ("I64", [1, 2], bytes(16))},
    ],
)
def test_tensors_are_those_the_frames_need(change, schema, refuses) -> None:  # rule P3
    with refuses("P3"):
        parse(build(TENSORS | change), schema=schema, key=KEY)


@pytest.mark.parametrize("name", list(TENSORS))
def test_missing_tensors(name, schema, refuses) -> None:  # rule P3
    with refuses("P3"):
        parse(build({k: v for k, v in TENSORS.items() if k != name}), schema=schema, key=KEY)


def test_values_of_another_dtype(schema, refuses) -> None:  # rule P3, field case F22
    tensors = {k: v for k, v in TENSORS.items() if k != "coo.value.BF16"}
    tensors = {"increment": tensors.pop("increment"), "coo.value.F32": ("F32", [1], bytes(4))} | tensors
    with refuses("P3"):
        parse(build(tensors), schema=schema, key=KEY)


@pytest.mark.parametrize(
    "meta",
    [
        "",
        "[]",
        "{}}",
        '{"version":1.0}',
        '{"version":7,"version":7}',
        META | {"version": 0},
        META | {"rank": 100_000},
        META | {"seq": 10_000},
        META | {"stream_id": "0"},
    ],
)
def test_metadata(meta, schema, refuses) -> None:  # rule P4
    with refuses("P4"):
        parse(build(meta=meta), schema=schema, key=KEY)


@pytest.mark.parametrize("metadata", [b"{}", b"null", b"[]", b'{"torch_delta":1}', b'{"format":"pt"}'])
def test_files_that_are_no_parts(metadata, schema, refuses) -> None:  # rule P4
    with refuses("P4", match="not a part"):
        parse(build({}, header=b'{"__metadata__":' + metadata + b"}"), schema=schema, key=KEY)
    with refuses("P4"):
        parse(build({}, header=b"{}"), schema=schema, key=KEY)


def test_metadata_of_another_format(schema, refuses) -> None:  # rule I1, rule J6
    with refuses("I1", unsupported=True):
        parse(build(meta={"format_version": [2, 0]}), schema=schema, key=KEY)
    for change in ({"version": True}, {"rank": -1}, {"seq": None}, {"stream_id": 0}):
        with refuses("J6"):
            parse(build(meta=META | change), schema=schema, key=KEY)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 65_544) + b" " * 65_544,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 16) + b'{"a":1}' + b" ",
        struct.pack("<Q", 8) + b"{}\0\0\0\0\0\0",
        struct.pack("<Q", 8) + b"[]      ",
        struct.pack("<Q", 8) + b'{"a":1.}',
        struct.pack("<Q", 8) + b"{\xff\xff}    ",
        struct.pack("<Q", 16) + b'{"a":1,"a":2}   ',
        struct.pack("<Q", 16) + b'{"aaaaaaa":NaN} ',
        struct.pack("<Q", 48) + b'{"a":' + b"[" * 21 + b"]" * 21 + b"}",
    ],
)
def test_headers(data, schema, refuses) -> None:  # rule P11
    with refuses("P11"):
        parse(data, schema=schema, key=KEY)


def test_the_header_begins_at_once(schema, refuses) -> None:  # rule P11
    good = build()
    text = b" " * 8 + good[8 : 8 + struct.unpack("<Q", good[:8])[0]]
    with refuses("P11", match="begins with"):
        parse(build(header=text), schema=schema, key=KEY)


def test_overlap_within_a_part(schema, refuses) -> None:  # rule P1
    table = bytes([2, 1, 1, 3 * 4 + 1, 2, 2, 1, 3, 1, 3 * 4 + 1, 3, 1])
    tensors = {
        "increment": ("U64", [2, 2], bytes(32)),
        "coo.index.u32": TENSORS["coo.index.u32"],
        "coo.value.BF16": TENSORS["coo.value.BF16"],
        "dense.BF16": ("BF16", [2], bytes(4)),
        "table": ("U8", [len(table)], table),
    }
    with refuses("P1"):
        parse(build(tensors), schema=schema, key=KEY)


def commit_of(**more) -> tuple[PartRef, Commit]:
    ref = PartRef(key=KEY, stored_bytes=1, sha256=HASH, rank=1, num_slices=1, num_changed=1)
    values = {"stream_id": ID, "version": 7, "parent_sha256": HASH, "schema_id": HASH, "parts": (ref,)}
    return ref, Commit(**(values | {"state_sha256": HASH, "num_changed": 1} | more))


def test_a_part_is_the_one_its_commit_names(schema, refuses) -> None:  # rule P13
    part = parse(build(), schema=schema, key=KEY)
    ref, commit = commit_of()
    part.check_reference(ref, commit)
    with refuses("P13"):
        part.check_reference(ref, commit_of(stream_id="1" * 32)[1])
    for change in ({"num_slices": 2}, {"num_changed": 2}, {"key": KEY.replace("-0000-", "-0001-")}):
        with refuses("P13"):
            part.check_reference(replace(ref, **change), commit)
    for change in ({"version": 8}, {"rank": 2}, {"seq": 1}, {"stream_id": "1" * 32}):
        other = parse(build(meta=META | change), schema=schema, key=KEY)
        with refuses("P13"):
            other.check_reference(ref, commit)


@given(st.integers(0, 600), st.binary(min_size=1, max_size=8))
def test_overwritten_bytes_are_read_or_refused(at, patch) -> None:
    schema = Schema(
        (
            TensorSpec("a", "F32", (3,)),
            TensorSpec("b", "I8", (2,)),
            TensorSpec("c", "I64", ()),
            TensorSpec("w", "BF16", (4, 2)),
        )
    )
    data = bytearray(build())
    at %= len(data)
    data[at : at + len(patch)] = patch[: len(data) - at]
    try:
        parse(data, schema=schema, key=KEY)
    except FormatError as error:
        assert error.rule  # noqa: PT017 - the point is that nothing else is raised
