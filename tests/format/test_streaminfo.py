"""stream.json: identity, base, features."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from torch_delta.format import BaseInfo, Schema, StreamInfo, digest_words

ID = "0" * 32
DIGESTS = tuple(digest_words([value]) for value in range(5))


def info(schema: Schema, **more) -> StreamInfo:
    base = BaseInfo(kind="hf", name="org/model", revision="abc", digests=DIGESTS)
    return StreamInfo(stream_id=ID, schema_id=schema.id, base=base, **more)


@pytest.fixture
def fields(schema) -> dict:
    """The JSON of a valid stream.json, to be broken."""
    return json.loads(info(schema).to_bytes().split(b"\n")[0])


def test_round_trip(schema) -> None:
    full = info(schema, absolute_only=True, info={"writer": "é"})
    assert StreamInfo.from_bytes(full.to_bytes()) == full
    full.check_schema(schema)


def test_unknown_fields_are_ignored(fields, schema, sealed) -> None:  # rule J6
    fields |= {"created": 1, "later": {"x": [None]}, "format_version": [1, 7]}
    fields["base"]["size"] = 3
    assert StreamInfo.from_bytes(sealed(fields)) == info(schema)


@pytest.mark.parametrize("value", ["torch_delta", "", "Torch-Delta"])
def test_not_a_stream(value, fields, refuses, sealed) -> None:  # rule I1
    with refuses("I1"):
        StreamInfo.from_bytes(sealed(fields | {"format": value}))


@pytest.mark.parametrize("value", [[], [1], [1, 0, 0], [1, -1]])
def test_malformed_format_version(value, fields, refuses, sealed) -> None:  # rule I1
    with refuses("I1"):
        StreamInfo.from_bytes(sealed(fields | {"format_version": value}))


@pytest.mark.parametrize("value", [[2, 0], [0, 9]])
def test_other_major_version(value, fields, refuses, sealed) -> None:  # rule I1, rule R1
    with refuses("I1", match="use a matching release", unsupported=True):
        StreamInfo.from_bytes(sealed(fields | {"format_version": value, "base": "changed shape"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("stream_id", "0" * 31), ("stream_id", "A" * 32), ("stream_id", "../" * 10 + "ab"), ("schema", "0" * 63)],
)
def test_identity(name, value, fields, refuses, sealed) -> None:  # rule I2
    with refuses("I2"):
        StreamInfo.from_bytes(sealed(fields | {name: value}))


def test_base_kind_and_name(fields, refuses, sealed) -> None:  # rule I3, field case F118
    for change in ({"kind": "s3"}, {"name": "x" * 4097}, {"revision": "x" * 4097}):
        with refuses("I3"):
            StreamInfo.from_bytes(sealed(fields | {"base": fields["base"] | change}))


def test_base_has_a_digest_per_tensor_with_data(schema, refuses) -> None:  # rule I3
    short = info(schema)
    short = replace(short, base=replace(short.base, digests=DIGESTS[:-1]))
    with refuses("I3", match="4 digests"):
        short.check_schema(schema)
    with refuses("S1"):
        info(schema).check_schema(Schema(schema.tensors[:4]))


def test_base_digests_are_hex(fields, refuses, sealed) -> None:  # rule D4
    with refuses("D4"):
        StreamInfo.from_bytes(sealed(fields | {"base": fields["base"] | {"digests": "0" * 33}}))


def test_unknown_feature(fields, refuses, sealed) -> None:  # rule I4, rule R1
    with refuses("I4", match="teleport.*upgrade", unsupported=True):
        StreamInfo.from_bytes(sealed(fields | {"required_features": ["packed", "teleport"]}))
    assert StreamInfo.from_bytes(sealed(fields | {"required_features": ["packed"]})).required_features == ("packed",)


@pytest.mark.parametrize("features", [["UPPER"], [""], ["a b"], ["x" * 65], ["x"] * 65])
def test_malformed_features(features, fields, refuses, sealed) -> None:  # rule I4
    with refuses("I4"):
        StreamInfo.from_bytes(sealed(fields | {"required_features": features}))


@pytest.mark.parametrize("value", [{"x" * 65: ""}, {"x": "y" * 4097}, {f"{n}": "" for n in range(65)}])
def test_info_is_bounded(value, fields, refuses, sealed) -> None:  # rule I6
    with refuses("I6"):
        StreamInfo.from_bytes(sealed(fields | {"info": value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 1),
        ("format_version", "1.0"),
        ("format_version", [True, False]),
        ("stream_id", None),
        ("schema", 7),
        ("base", []),
        ("base", {}),
        ("required_features", {}),
        ("required_features", [1]),
        ("absolute_only", 0),
        ("absolute_only", None),
        ("info", []),
        ("info", {"a": 1}),
    ],
)
def test_json_types(name, value, fields, refuses, sealed) -> None:  # rule J6
    with refuses("J6"):
        StreamInfo.from_bytes(sealed(fields | {name: value}))


def test_every_field_is_required(fields, refuses, sealed) -> None:  # rule J6
    for name in fields:
        with refuses("J6", match=f"{name} must be"):
            StreamInfo.from_bytes(sealed({k: v for k, v in fields.items() if k != name}))
