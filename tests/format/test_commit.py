"""Commits and the chain of hashes."""

from __future__ import annotations

import json

import pytest

from torch_delta.errors import ChainError
from torch_delta.format import Commit, PartRef, check_parent
from torch_delta.format.keys import part_key

ID, HASH = "0" * 32, "ab" * 32
KEY = "commits/00000000000000000007.json"
NONCE = "0123456789abcdef"


def ref(rank=0, version=7, **more) -> PartRef:
    values = {"key": part_key(version, rank, 0, NONCE), "stored_bytes": 100, "sha256": HASH, "rank": rank}
    return PartRef(**(values | {"num_slices": 2, "num_changed": 5} | more))


def commit(**more) -> Commit:
    values = {"stream_id": ID, "version": 7, "parent_sha256": HASH, "schema_id": HASH, "parts": (ref(0), ref(1))}
    return Commit(**(values | {"state_sha256": HASH, "num_changed": 10} | more))


@pytest.fixture
def fields() -> dict:
    """The JSON of a valid commit, to be broken."""
    return json.loads(commit().to_bytes().split(b"\n")[0])


def test_round_trip() -> None:
    full = commit(info={"step": "70"})
    assert full.key == KEY
    assert Commit.from_bytes(full.to_bytes(), key=KEY) == full
    empty = commit(parts=(), num_changed=0)
    assert Commit.from_bytes(empty.to_bytes(), key=KEY) == empty


def test_unknown_fields_are_ignored(fields, sealed) -> None:  # rule J6
    fields["parts"][0]["future"] = 1
    assert Commit.from_bytes(sealed(fields | {"future": [], "format_version": [1, 99]}), key=KEY) == commit()


def test_version_and_key_agree(fields, refuses, sealed) -> None:  # rule C1
    with refuses("C1"):
        Commit.from_bytes(sealed(fields), key="commits/00000000000000000008.json")
    with refuses("C1"):
        Commit.from_bytes(sealed(fields | {"version": 0}), key=KEY)
    with refuses("K3"):
        Commit.from_bytes(sealed(fields), key="commits/7.json")


def test_parent_hash(fields, refuses, sealed) -> None:  # rule C2
    with refuses("C2"):
        Commit.from_bytes(sealed(fields | {"parent_sha256": HASH[:-1]}), key=KEY)


def test_another_history_is_a_fork() -> None:  # rule C2
    check_parent(commit(), HASH)
    with pytest.raises(ChainError, match="forks from another history") as caught:
        check_parent(commit(), "cd" * 32)
    assert (caught.value.version, caught.value.expected, caught.value.got) == (7, "cd" * 32, HASH)
    assert caught.value.action == "resync"


@pytest.mark.parametrize(
    "change",
    [
        {"key": f"parts/00000000000000000008/00000-0000-{NONCE}.safetensors"},
        {"rank": 1},
        {"sha256": "AB" * 32},
        {"sha256": ""},
        {"slices": 0},
        {"slices": 2**18 + 1},
        {"bytes": 2**53 - 1, "slices": 0},
    ],
)
def test_part_references(change, fields, refuses, sealed) -> None:  # rule C3
    fields["parts"][0] |= change
    with refuses("C3"):
        Commit.from_bytes(sealed(fields), key=KEY)


@pytest.mark.parametrize(
    "key",
    [
        "../../etc/passwd",
        "/etc/passwd",
        f"parts/00000000000000000007/../00000-0000-{NONCE}.safetensors",
        f"parts/00000000000000000007/00000-0000-{NONCE}.safetensors\x00.txt",
        "commits/00000000000000000006.json",
        "parts/7/0-0-0.safetensors",
        "x" * 600,
    ],
)
def test_hostile_part_keys(key, fields, refuses, sealed) -> None:  # rule K3, field case F117
    fields["parts"][0]["key"] = key
    with refuses("K3"):
        Commit.from_bytes(sealed(fields), key=KEY)


def test_parts_are_sorted_and_unique(fields, refuses, sealed) -> None:  # rule C3
    with refuses("C3", match="sorted by key"):
        Commit.from_bytes(sealed(fields | {"parts": fields["parts"][::-1]}), key=KEY)
    with refuses("C3", match="sorted by key"):
        Commit.from_bytes(sealed(fields | {"parts": fields["parts"][:1] * 2}), key=KEY)
    with refuses("C3", match="at most"):
        Commit.from_bytes(sealed(fields | {"parts": [{}] * (2**16 + 1)}), key=KEY)
    with refuses("C3", match="at most"):
        commit(parts=(ref(0),) * (2**16 + 1))


def test_counts_add_up(fields, refuses, sealed) -> None:  # rule C4
    with refuses("C4"):
        Commit.from_bytes(sealed(fields | {"changed": 11}), key=KEY)


@pytest.mark.parametrize("value", ["", "0" * 63, "G" * 64, "0" * 65])
def test_state_hash(value, fields, refuses, sealed) -> None:  # rule C5
    with refuses("C5"):
        Commit.from_bytes(sealed(fields | {"state_sha256": value}), key=KEY)


def test_another_identity(fields, refuses, sealed) -> None:  # rule I2
    for change in ({"stream_id": "x" * 32}, {"schema": "0"}):
        with refuses("I2"):
            Commit.from_bytes(sealed(fields | change), key=KEY)


def test_newer_formats(fields, refuses, sealed) -> None:  # rule I1, rule I4
    with refuses("I1", unsupported=True):
        Commit.from_bytes(sealed({"format_version": [2, 0]}), key=KEY)
    # The feature is named even where it changes what the other fields mean.
    with refuses("I4", unsupported=True):
        Commit.from_bytes(sealed(fields | {"required_features": ["teleport"], "parts": "elsewhere"}), key=KEY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", "7"),
        ("version", True),
        ("version", -7),
        ("parts", {}),
        ("parts", [[]]),
        ("changed", None),
        ("state_sha256", 0),
        ("parent_sha256", []),
    ],
)
def test_json_types(name, value, fields, refuses, sealed) -> None:  # rule J6
    with refuses("J6"):
        Commit.from_bytes(sealed(fields | {name: value}), key=KEY)


@pytest.mark.parametrize(
    ("name", "value"), [("bytes", True), ("bytes", -1), ("rank", "0"), ("slices", None), ("changed", []), ("key", 1)]
)
def test_json_types_of_parts(name, value, fields, refuses, sealed) -> None:  # rule J6
    fields["parts"][1][name] = value
    with refuses("J6", match=rf"parts\[1\]\.{name}"):
        Commit.from_bytes(sealed(fields), key=KEY)
