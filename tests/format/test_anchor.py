"""Anchor manifests, the head hint and the successor."""

from __future__ import annotations

import json

import pytest

from torch_delta.format import AnchorFile, AnchorManifest, Head, Schema, Successor, digest_words
from torch_delta.format.head import Sign

ID, HASH, NONCE = "0" * 32, "ab" * 32, "0123456789abcdef"
FOLDER = f"anchors/00000000000000000007-{NONCE}"
KEY = f"{FOLDER}.json"


def file(name: str) -> AnchorFile:
    return AnchorFile(name=name, key=f"{FOLDER}/{name}", stored_bytes=1, sha256=HASH)


def manifest(schema: Schema) -> AnchorManifest:
    names = [schema.tensors[at].name for at in schema.data_indices]
    return AnchorManifest(
        stream_id=ID,
        version=7,
        commit_sha256=HASH,
        schema_id=schema.id,
        files=(file("README.md"), file("model-1.safetensors"), file("model-2.safetensors")),
        tensor_files=dict.fromkeys(names, "model-1.safetensors") | {"w": "model-2.safetensors"},
        digests=tuple(digest_words([value]) for value in range(5)),
        info={"writer": "test"},
    )


@pytest.fixture
def fields(schema) -> dict:
    """The JSON of a valid manifest, to be broken."""
    return json.loads(manifest(schema).to_bytes().split(b"\n")[0])


def test_round_trip(schema) -> None:
    full = manifest(schema)
    full.check_schema(schema)
    assert (full.key, full.nonce) == (KEY, NONCE)
    assert AnchorManifest.from_bytes(full.to_bytes(), key=KEY) == full


@pytest.mark.parametrize(
    "key", [KEY.replace("7-", "8-"), KEY.replace("cdef", "cdee"), "anchors/00000000000000000007.json"]
)
def test_the_key_is_the_manifests(key, fields, refuses, sealed) -> None:  # rule A5
    with refuses("A5"):
        AnchorManifest.from_bytes(sealed(fields), key=key)


def test_commit_hash(fields, refuses, sealed) -> None:  # rule A2
    for value in (None, "", "0" * 63):
        with refuses("A2"):
            AnchorManifest.from_bytes(sealed(fields | {"commit_sha256": value}), key=KEY)


def test_anchor_zero_may_precede_the_stream(fields, sealed) -> None:  # rule A2
    for entry in fields["files"]:
        entry["key"] = entry["key"].replace("7-", "0-")
    zero = sealed(fields | {"commit_sha256": None, "version": 0})
    assert AnchorManifest.from_bytes(zero, key=KEY.replace("7-", "0-")).commit_sha256 is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../model.safetensors"},
        {"name": ".hidden"},
        {"name": "a/b"},
        {"name": ""},
        {"name": "x" * 201},
        {"name": "model-1.safetensors"},
        {"name": "z"},
        {"sha256": "0"},
        {"key": f"{FOLDER.replace('7-', '6-')}/README.md"},
        {"key": f"{FOLDER.replace('cdef', 'cdee')}/README.md"},
        {"key": f"{FOLDER}/model-1.safetensors"},
        {"key": f"{FOLDER}/MODEL-2.safetensors"},
    ],
)
def test_files(change, fields, refuses, sealed) -> None:  # rule A3
    fields["files"][0] |= change
    with refuses("A3"):
        AnchorManifest.from_bytes(sealed(fields), key=KEY)


def test_file_names_differ_in_more_than_case(fields, refuses, sealed) -> None:  # rule A3
    fields["files"][0] |= {"name": "MODEL-1.safetensors"}
    with refuses("A3", match="case only"):
        AnchorManifest.from_bytes(sealed(fields), key=KEY)


def test_number_of_files(fields, refuses, sealed) -> None:  # rule A3
    for files in ([], [{}] * (2**16 + 1)):
        with refuses("A3"):
            AnchorManifest.from_bytes(sealed(fields | {"files": files}), key=KEY)


@pytest.mark.parametrize(
    "key", ["../../x", "/etc/passwd", f"{FOLDER}/..", f"{FOLDER}/a/b", f"{FOLDER}/a\x00", "stream.json"]
)
def test_hostile_file_keys(key, fields, refuses, sealed) -> None:  # rule K3, field case F117
    fields["files"][0]["key"] = key
    with refuses("K3"):
        AnchorManifest.from_bytes(sealed(fields), key=KEY)


def test_every_tensor_has_a_file_and_a_digest(fields, schema, refuses, sealed) -> None:  # rule A4
    lost = {name: at for name, at in fields["tensor_files"].items() if name != "w"}
    for change in (
        {"tensor_files": fields["tensor_files"] | {"w": "model-3.safetensors"}},
        {"tensor_files": lost},
        {"digests": fields["digests"][:-32]},
    ):
        with refuses("A4"):
            AnchorManifest.from_bytes(sealed(fields | change), key=KEY)
    for tensors in (lost | {"v": "model-1.safetensors"}, lost | {"z_tied": "model-1.safetensors"}):
        other = AnchorManifest.from_bytes(sealed(fields | {"tensor_files": tensors}), key=KEY)
        with refuses("A4"):
            other.check_schema(schema)
    with refuses("S1"):
        AnchorManifest.from_bytes(sealed(fields), key=KEY).check_schema(Schema(schema.tensors[:4]))


def test_other_rules_hold_for_manifests(fields, refuses, sealed) -> None:
    for rule, change in (
        ("D4", {"digests": "zz"}),
        ("I2", {"stream_id": ""}),
        ("I2", {"schema": ""}),
        ("I6", {"info": {"a": "b" * 5000}}),
        ("J6", {"version": True}),
        ("J6", {"files": [1]}),
        ("J6", {"tensor_files": {"w": 1}}),
        ("J6", {"commit_sha256": 1}),
    ):
        with refuses(rule):
            AnchorManifest.from_bytes(sealed(fields | change), key=KEY)
    with refuses("I1", unsupported=True):
        AnchorManifest.from_bytes(sealed({"format_version": [2, 0]}), key=KEY)


def test_head_round_trip() -> None:
    head = Head(stream_id=ID, version=3, commit_sha256=HASH)
    assert Head.from_bytes(head.to_bytes()) == head


def test_a_sign_of_life_round_trips_and_is_optional(refuses, sealed) -> None:  # rule H2
    sign = Sign(writer="0123456789abcdef", seconds=60, beat=7, info={"host": "trainer", "pid": "12"})
    head = Head(stream_id=ID, version=3, commit_sha256=HASH, sign=sign)
    assert Head.from_bytes(head.to_bytes()) == head
    assert sign.owner == "host trainer, pid 12"
    good = {"format_version": [1, 0], "stream_id": ID, "version": 3, "commit_sha256": HASH}
    assert Head.from_bytes(sealed(good | {"sign": None})).sign is None
    fine = {"writer": "0123456789abcdef", "seconds": 0, "beat": 1, "info": {}}
    assert Head.from_bytes(sealed(good | {"sign": fine | {"later": 1}})).sign is not None
    for rule, change in (
        ("H2", {"writer": "x"}),
        ("H2", {"seconds": 604_801}),
        ("J6", {"seconds": -1}),
        ("J6", {"beat": True}),
        ("J6", {"info": {"host": 1}}),
    ):
        with refuses(rule):
            Head.from_bytes(sealed(good | {"sign": fine | change}))


@pytest.mark.parametrize(
    ("rule", "change"),
    [("H1", {"commit_sha256": ""}), ("I2", {"stream_id": "1"}), ("J6", {"version": -1}), ("J6", {"version": None})],
)
def test_bad_hints(rule, change, refuses, sealed) -> None:  # rule H1
    good = {"format_version": [1, 0], "stream_id": ID, "version": 3, "commit_sha256": HASH}
    with refuses(rule):
        Head.from_bytes(sealed(good | change))
    with refuses("J5"):
        Head.from_bytes(b"x" * 70_000)


def successor(**more) -> dict:
    good = {"format_version": [1, 0], "stream_id": ID, "version": 3, "commit_sha256": HASH, "root": "run-7-b"}
    return good | {"successor_id": "1" * 32, "info": {}} | more


def test_successor_round_trip(sealed) -> None:
    parsed = Successor.from_bytes(sealed(successor(later=1)))
    assert (parsed.root, parsed.successor_id, parsed.version) == ("run-7-b", "1" * 32, 3)
    assert Successor.from_bytes(parsed.to_bytes()) == parsed


def test_successor_fork_point(refuses, sealed) -> None:  # rule N1
    with refuses("N1"):
        Successor.from_bytes(sealed(successor(commit_sha256="0")))
    with refuses("N1"):
        Successor(stream_id=ID, version=2**53, commit_sha256=HASH, root="x", successor_id="1" * 32)


@pytest.mark.parametrize("root", ["", "../other", "/abs", "s3://bucket/x", "a/../b", "a\x00", "http:/x", "..", "Run"])
def test_successor_stays_beside_the_stream(root, refuses, sealed) -> None:  # rule N2, field case F117
    with refuses("N2"):
        Successor.from_bytes(sealed(successor(root=root)))


def test_successor_is_another_stream(refuses, sealed) -> None:  # rule N2
    with refuses("N2"):
        Successor.from_bytes(sealed(successor(successor_id=ID)))
    with refuses("I2"):
        Successor.from_bytes(sealed(successor(successor_id="")))
