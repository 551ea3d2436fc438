"""The slice table, byte by byte.

Tensors by schema index: 0 bias [3], 1 cube [2,3,4], 2 scalar [], 3 w [4,2], 4 wide [8,8], 5 an alias.
"""

from __future__ import annotations

import pytest

from torch_delta.format import (
    ZERO,
    Box,
    Digest,
    Frame,
    Schema,
    Slice,
    TensorSpec,
    check_absolute,
    check_slices_disjoint,
    coo_index_name,
    frames,
)
from torch_delta.format.limits import MAX_SLICES, MAX_TABLE_BYTES
from torch_delta.format.table import decode_table, decode_varints, encode_table, encode_varint

COO, XOR, DENSE, PACKED = 1, 2, 3, 4


def decode(table, schema, num_slices=None) -> tuple[Frame, ...]:
    """Decode a table of small numbers, with as many zero increments as its single frame has slices."""
    data = table if isinstance(table, bytes) else bytes(table)
    num_slices = (data[2] if len(data) > 2 else 0) if num_slices is None else num_slices
    return decode_table(data, bytes(16 * num_slices), schema=schema, key="p")


def test_literal_table(schema) -> None:
    frames = (
        Frame("coo", (Slice(0, Box((1,), (2,)), 1, Digest((1, 2))), Slice(3, Box((0, 1), (4, 1)), 3, ZERO))),
        Frame("xor", (Slice(1, Box.whole((2, 3, 4)), 24, Digest((3, 2**64 - 1))),), 300, 24),
        Frame("dense", (Slice(2, Box((), ()), 1, ZERO),)),
    )
    table, increment = encode_table(frames, schema=schema, key="p")
    # fmt: off
    assert list(table) == [
        3,
        COO, 2,  0 * 4 + 1, 1, 2, 1,  3 * 4 + 2, 0, 4, 1, 1, 3,
        XOR, 1, 0xAC, 0x02, 24,  1 * 4 + 0, 24,
        DENSE, 1,  2 * 4 + 0,
    ]
    # fmt: on
    assert increment == b"".join(value.to_bytes(8, "little") for value in (1, 2, 0, 0, 3, 2**64 - 1, 0, 0))
    again = decode_table(table, increment, schema=schema, key="p")
    assert [(f.encoding, f.slices, f.stored_bytes, f.raw_bytes) for f in again] == [
        (f.encoding, f.slices, f.stored_bytes, f.raw_bytes) for f in frames
    ]


def test_frames_compare_by_identity(schema) -> None:
    one, two = (decode([1, COO, 1, 0, 1], schema)[0] for _ in range(2))
    assert one.slices == two.slices
    assert one != two


@pytest.mark.parametrize(
    ("value", "data"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**63 - 1, "ff" * 8 + "7f")]
)
def test_varints(value, data) -> None:
    assert encode_varint(value).hex() == data
    assert decode_varints(bytes.fromhex("05" + data + "06"), key="p") == [5, value, 6]


@pytest.mark.parametrize(
    "data",
    [
        "80",
        "8080",
        "ff" * 9,
        "ff" * 9 + "00",
        "80" * 8 + "8001",
        "8000",
        "ff00",
        "818000",
        "80" * 1000,
        "80" * 8 + "00",
    ],
)
def test_bad_varints(data, refuses) -> None:  # rule P5
    with refuses("P5"):
        decode_varints(bytes.fromhex(data), key="p")
    for value in (-1, 2**63):
        with refuses("P5"):
            encode_varint(value)


@pytest.mark.parametrize(
    ("table", "num_slices"),
    [
        ([], 0),
        ([1], 0),
        ([1, COO], 0),
        ([1, COO, 0], 0),
        ([1, COO, 1], 1),
        ([1, COO, 1, 0], 1),
        ([1, COO, 1, 0, 1, 0], 1),
        ([1, COO, 1, 0, 1], 0),
        ([1, COO, 1, 0, 1], 2),
        ([1, COO, 2, 0, 1], 1),
        ([2, COO, 1, 0, 1], 1),
        ([0, COO, 1, 0, 1], 1),
        ([1, COO, 1, 1, 0], 1),
        ([1, XOR, 1, 9], 1),
        ([0], 1),
        (encode_varint(2**63 - 1), 0),
        (bytes([1, COO]) + encode_varint(2**63 - 1) + b"\0\1", 1),
    ],
)
def test_structure(table, num_slices, schema, refuses) -> None:  # rule P6
    with refuses("P6"):
        decode(table, schema, num_slices)


def test_sizes(schema, refuses) -> None:  # rule P6
    with refuses("P6"):
        decode_table(bytes(MAX_TABLE_BYTES + 1), b"", schema=schema, key="p")
    with refuses("P6"):
        decode_table(b"\0", bytes(16 * (MAX_SLICES + 1)), schema=schema, key="p")
    with refuses("P6"):
        decode_table(b"\0", bytes(15), schema=schema, key="p")
    with refuses("P6"):
        encode_table([Frame("coo", ())], schema=schema, key="p")


def test_too_many_slices_when_writing(schema, refuses, monkeypatch) -> None:  # rule P6
    slices = tuple(Slice(0, Box((at,), (1,)), 1, ZERO) for at in range(3))
    monkeypatch.setattr("torch_delta.format.table.MAX_SLICES", 3)
    encode_table([Frame("coo", slices)], schema=schema, key="p")
    monkeypatch.setattr("torch_delta.format.table.MAX_SLICES", 2)
    with refuses("P6", match="several parts"):
        encode_table([Frame("coo", slices)], schema=schema, key="p")


def test_empty_table(schema) -> None:
    assert encode_table([], schema=schema, key="p") == (b"\0", b"")
    assert decode([0], schema) == ()


@pytest.mark.parametrize(
    "table",
    [
        [1, COO, 1, 6 * 4, 1],
        [1, COO, 1, *encode_varint(2**63 - 1), 1],
        [1, COO, 1, 5 * 4, 1],
        [1, COO, 2, 0, 1, 0, 1],
        [1, COO, 2, 1, 1, 1, 1, 1, 0, 1, 1],
        [1, COO, 2, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, COO, 2, 3 * 4 + 2, 2, 1, 0, 1, 1, 2, 1, 1, 1, 1, 1],
    ],
)
def test_tensors_and_their_order(table, schema, refuses) -> None:  # rule P7, field case F59
    with refuses("P7"):
        decode(table, schema)


def test_order_when_writing(schema, refuses) -> None:  # rule P7
    first, second = Slice(0, Box((0,), (1,)), 1, ZERO), Slice(3, Box((0, 0), (1, 2)), 1, ZERO)
    encode_table([Frame("coo", (first, second))], schema=schema, key="p")
    with refuses("P7"):
        encode_table([Frame("coo", (second, first))], schema=schema, key="p")
    with refuses("P7"):
        encode_table([Frame("coo", (Slice(-1, Box((), ()), 1, ZERO),))], schema=schema, key="p")


@pytest.mark.parametrize(
    "table",
    [
        [1, COO, 1, 1, 0, 0, 1],
        [1, COO, 1, 1, 0, 4, 1],
        [1, COO, 1, 1, 3, 1, 1],
        [1, COO, 1, 1, 2, 2, 1],
        [1, COO, 1, 1, *encode_varint(2**63 - 1), 1, 1],
        [1, COO, 1, 1, 0, *encode_varint(2**63 - 1), 1],
        [1, COO, 1, 1, 0, 3, 1],
        [1, COO, 1, 2, 0, 3, 1],
        [1, COO, 1, 2, 1, 1, 1],
        [1, COO, 1, 3, 1],
        [1, COO, 1, 2 * 4 + 1, 0, 1, 1],
        [1, COO, 1, 2 * 4 + 2, 1],
        [1, COO, 1, 3 * 4 + 2, 0, 4, 0, 2, 1],
        [1, COO, 1, 3 * 4 + 2, 1, 1, 0, 2, 1],
        [1, COO, 1, 3 * 4 + 2, 0, 4, 1, 2, 1],
        [1, COO, 1, 3 * 4 + 2, 0, 4, 1, 0, 1],
    ],
)
def test_boxes(table, schema, refuses) -> None:  # rule P8, field case F59
    with refuses("P8"):
        decode(table, schema)


def test_boxes_when_writing(schema, refuses) -> None:  # rule P8
    for box in (Box((0,), (2,)), Box((0, 0), (4, 3)), Box((-1, 0), (2, 2)), Box((0, 0), (0, 2)), Box((4, 0), (1, 2))):
        with refuses("P8"):
            encode_table([Frame("coo", (Slice(3, box, 1, ZERO),))], schema=schema, key="p")


def test_a_tensor_without_elements_has_no_slice(refuses) -> None:  # rule P8
    with refuses("P8"):
        decode([1, DENSE, 1, 0], Schema((TensorSpec("e", "F16", (0, 4)),)))


@pytest.mark.parametrize(
    "table", [[1, COO, 1, 0, 0], [1, COO, 1, 0, 4], [1, COO, 1, 1, 0, 2, 3], [1, XOR, 1, 9, 12, 0, 4]]
)
def test_counts(table, schema, refuses) -> None:  # rule P9, field case F65
    with refuses("P9"):
        decode(table, schema)


def test_dense_sets_its_whole_box(schema, refuses) -> None:  # rule P9
    assert decode([1, DENSE, 1, 1, 0, 2], schema)[0].slices[0].count == 2
    with refuses("P9"):
        encode_table([Frame("dense", (Slice(0, Box((0,), (2,)), 1, ZERO),))], schema=schema, key="p")


@pytest.mark.parametrize("table", [[1, XOR, 1, 0, 12, 0, 1], [1, XOR, 1, 9, 0, 0, 1], [1, XOR, 1, 9, 11, 0, 1]])
def test_blob_sizes(table, schema, refuses) -> None:  # rule P10
    with refuses("P10"):
        decode(table, schema)


def test_frames_are_bounded(schema, refuses) -> None:  # rule P10
    big = Schema((TensorSpec("a", "F32", (2**20, 3)), TensorSpec("b", "U8", (1,))))
    a, b = Slice(0, Box.whole((2**20, 3)), 1, ZERO), Slice(1, Box.whole((1,)), 1, ZERO)
    encode_table([Frame("xor", (a,), 9, 12 * 2**20)], schema=big, key="p")
    with refuses("P10", match="several slices"):
        encode_table([Frame("xor", (a, b), 9, 12 * 2**20 + 1)], schema=big, key="p")
    with refuses("P10", match="states no sizes"):
        encode_table([Frame("coo", (b,), 1, 1)], schema=big, key="p")


@pytest.mark.parametrize("code", [0, 5, 127])
def test_unknown_encodings(code, schema, refuses) -> None:  # rule P12, rule R1
    with refuses("P12", match="upgrade", unsupported=True):
        decode([1, code, 1, 0, 1], schema)
    with refuses("P12"):
        encode_table([Frame("rank", (Slice(0, Box.whole((3,)), 1, ZERO),))], schema=schema, key="p")


def test_a_reader_without_packed_refuses_it(schema, refuses, monkeypatch) -> None:  # rule P12, rule R1
    table = [1, PACKED, 1, 9, 12, 0, 1]
    frame = Frame("packed", (Slice(0, Box.whole((3,)), 1, ZERO),), 9, 12)
    [read] = decode(table, schema)
    assert (read.encoding, read.stored_bytes, read.raw_bytes) == ("packed", 9, 12)
    encode_table([frame], schema=schema, key="p")
    monkeypatch.setattr(frames, "SUPPORTED_FEATURES", frozenset())
    with refuses("P12", match="packed", unsupported=True):
        decode(table, schema)
    with refuses("P12", unsupported=True):
        encode_table([frame], schema=schema, key="p")


def test_packed_frames_are_about_the_bytes_of_their_boxes(schema, refuses) -> None:  # rule P10
    for raw in (11, 13, 100):
        with refuses("P10", match="about the 12 bytes of its boxes"):
            decode([1, PACKED, 1, 9, raw, 0, 1], schema)
    big = Schema((TensorSpec("a", "U8", (8 * 2**20 + 1,)),))
    limit = Frame("packed", (Slice(0, Box((0,), (8 * 2**20,)), 1, ZERO),), 9, 8 * 2**20)
    encode_table([limit], schema=big, key="p")
    with refuses("P10", match="at most 8388608 raw bytes"):
        encode_table(
            [Frame("packed", (Slice(0, Box.whole((8 * 2**20 + 1,)), 1, ZERO),), 9, 8 * 2**20 + 1)], schema=big, key="p"
        )


def test_index_width_follows_the_box() -> None:  # rule E2
    assert coo_index_name(1) == coo_index_name(2**32 - 1) == "coo.index.u32"
    assert coo_index_name(2**32) == "coo.index.u64"


def test_overlap_across_frames_and_parts(schema, refuses) -> None:  # rule P1
    top = Frame("coo", (Slice(3, Box((0, 0), (2, 2)), 1, ZERO),))
    bottom = Frame("dense", (Slice(3, Box((2, 0), (2, 2)), 4, ZERO),))
    column = Frame("xor", (Slice(3, Box((0, 1), (4, 1)), 4, ZERO),), 9, 8)
    check_slices_disjoint([[top], [bottom]], schema=schema)
    for groups in ([[top, column]], [[top], [column]], [[bottom, top], [bottom]]):
        with refuses("P1", match="w: two boxes overlap"):
            check_slices_disjoint(groups, schema=schema)


def test_absolute_only(schema, refuses) -> None:  # rule I5
    absolute = decode([2, COO, 1, 0, 1, DENSE, 1, 4], schema, 2)
    check_absolute(absolute, key="p")
    with refuses("I5"):
        check_absolute([*absolute, *decode([1, XOR, 1, 9, 12, 0, 1], schema)], key="p")
