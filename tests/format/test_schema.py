"""The tensor table."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from torch_delta.format import Schema, TensorSpec
from torch_delta.format.limits import MAX_JSON_BYTES, MAX_TENSORS


def table(*entries: dict) -> bytes:
    return json.dumps({"tensors": list(entries)}).encode()


def entry(name="w", dtype="BF16", shape=(4, 2), **more) -> dict:
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def test_literal_bytes() -> None:
    schema = Schema((TensorSpec("w", "BF16", (4, 2)),))
    assert schema.to_bytes() == b'{"tensors":[{"dtype":"BF16","name":"w","shape":[4,2]}]}'
    assert schema.id == "d10e80c27664fad313142af80431654ecf65ea991af5918080e5660ae5a1eb57"
    assert Schema.from_bytes(schema.to_bytes(), schema_id=schema.id) == schema


def test_lookups(schema) -> None:
    assert schema.index("w") == 3
    assert schema.by_name["w"].shape == (4, 2)
    assert schema.data_indices == (0, 1, 2, 3, 4)
    assert [spec.numel for spec in schema.tensors] == [3, 24, 1, 8, 64, 8]
    assert [spec.nbytes for spec in schema.tensors] == [12, 24, 8, 16, 128, 16]
    assert TensorSpec("empty", "F16", (0, 4)).nbytes == 0
    with pytest.raises(KeyError):
        schema.index("v")


def test_the_name_is_the_hash(refuses) -> None:  # rule S1
    data = table(entry())
    with refuses("S1"):
        Schema.from_bytes(data, schema_id="0" * 64)
    flipped = data.replace(b"[4, 2]", b"[2, 4]")
    with refuses("S1"):
        Schema.from_bytes(flipped, schema_id=hashlib.sha256(data).hexdigest())


def test_a_newer_minor_keeps_its_id_and_is_read() -> None:  # rule J6
    data = json.dumps({"future": {"a": [1]}, "tensors": [entry(layout="blocked")]}).encode()
    schema = Schema.from_bytes(data)
    assert schema.to_bytes() == data
    assert schema.id == hashlib.sha256(data).hexdigest()
    assert schema == Schema((TensorSpec("w", "BF16", (4, 2)),))


@pytest.mark.parametrize("names", [("b", "a"), ("a", "a"), ("é", "z"), ("\U0001f600", "\uffee")])
def test_order(names, refuses) -> None:  # rule S2
    with refuses("S2"):
        Schema.from_bytes(table(*(entry(name) for name in names)))


def test_too_many_tensors(refuses) -> None:  # rule S2
    with refuses("S2"):
        Schema.from_bytes(b'{"tensors":[' + b"0," * MAX_TENSORS + b"0]}")
    with refuses("S2", match=f"at most {MAX_TENSORS} tensors"):
        Schema((TensorSpec("w", "BF16", ()),) * (MAX_TENSORS + 1))


def test_a_large_schema_is_refused_before_it_is_hashed(refuses) -> None:  # rule J5
    with refuses("J5"):
        Schema.from_bytes(bytes(MAX_JSON_BYTES + 1), schema_id="0" * 64)


@pytest.mark.parametrize("name", ["", "x" * 513, "é" * 257, "__metadata__", "a\x00b", "a\nb", "a\u2028b", "\u202ea"])
def test_names(name, refuses) -> None:  # rule S3
    with refuses("S3"):
        Schema.from_bytes(table(entry(name)))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bf16", (1,)),
        ("C64", (1,)),
        ("", (1,)),
        ("BF16", (-1,)),
        ("BF16", (-1, -1)),
        ("BF16", (2**48 + 1,)),
        ("BF16", (2**40, 2**40)),
        ("BF16", (1,) * 17),
    ],
)
def test_dtypes_and_shapes(dtype, shape, refuses) -> None:  # rule S4, field case F22
    with refuses("S4"):
        Schema.from_bytes(table(entry(dtype=dtype, shape=shape)))


@pytest.mark.parametrize(
    ("alias_of", "dtype", "shape"),
    [
        ("w", "F16", (4, 2)),
        ("w", "BF16", (2, 4)),
        ("x", "BF16", (4, 2)),
        ("missing", "BF16", (4, 2)),
        ("", "BF16", (4, 2)),
    ],
)
def test_aliases(alias_of, dtype, shape, refuses) -> None:  # rule S5
    Schema.from_bytes(table(entry(), entry("x", alias_of="w"), entry("y", alias_of=None)))
    with refuses("S5"):
        Schema.from_bytes(table(entry(), entry("x", dtype, shape, alias_of=alias_of)))


def test_alias_of_an_alias(refuses) -> None:  # rule S5
    with refuses("S5"):
        Schema.from_bytes(table(entry(), entry("x", alias_of="w"), entry("y", alias_of="x")))


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b'{"tensors":{}}',
        b'{"tensors":[1]}',
        table({"name": "w", "dtype": "BF16"}),
        table(entry(name=1)),
        table(entry(shape=(True,))),
        table(entry(shape=("1",))),
        table(entry(alias_of=1)),
        table({**entry(), "shape": 4}),
        table({**entry(), "dtype": None}),
    ],
)
def test_json_types(data, refuses) -> None:  # rule J6
    with refuses("J6"):
        Schema.from_bytes(data)


def test_many_tensors_are_read_fast() -> None:
    names = [f"model.layers.{i // 400:02d}.mlp.experts.{i % 400:03d}.weight" for i in range(36_000)]
    schema = Schema(tuple(TensorSpec(name, "BF16", (768, 2048)) for name in sorted(names)))
    started_s = time.perf_counter()
    again = Schema.from_bytes(schema.to_bytes(), schema_id=schema.id)
    assert again.index(names[-1]) == len(names) - 1
    assert time.perf_counter() - started_s < 10  # 0.4 s on two old cores; this bound only catches a quadratic loop
