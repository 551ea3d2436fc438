"""Successors, leases, claims and forks: the bytes in the document are what the package writes, and what it reads."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torch_delta.format.fork import ForkNote
from torch_delta.format.head import Successor
from torch_delta.format.keys import claim_key, fork_key, lease_key, parse_claim_key, parse_fork_key, parse_lease_key
from torch_delta.format.lease import Claim, Lease

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text()
READ = {
    "successor.json": Successor.from_bytes,
    f"leases/{1:016x}.json": lambda data: Lease.from_bytes(data, key=f"leases/{1:016x}.json"),
    f"claims/{0:020d}.json": lambda data: Claim.from_bytes(data, key=f"claims/{0:020d}.json"),
    f"forks/{3:016x}.json": lambda data: ForkNote.from_bytes(data, key=f"forks/{3:016x}.json"),
}


def vector(key: str) -> bytes:
    match = re.search(rf"^`{re.escape(key)}`\n\n```json\n(.*?)```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1].encode()


@pytest.mark.parametrize("key", READ)
def test_vectors(key: str) -> None:
    # rules J1, L2, L4, N1, N2, N6
    stored = vector(key)
    line, sealed, end = stored.split(b"\n")
    assert (sealed.decode(), end) == (hashlib.sha256(line).hexdigest(), b"")
    parsed = READ[key](stored)
    assert parsed.to_bytes() == stored
    fields = json.loads(line)
    assert {name: getattr(parsed, name) for name in fields if name != "format_version"} == {
        name: value for name, value in fields.items() if name != "format_version"
    }


@pytest.mark.parametrize("key", READ)
@pytest.mark.parametrize("missing", ["stream_id", "info", "format_version"])
def test_every_field_is_needed(refuses: Callable, key: str, missing: str) -> None:
    # rule J6
    fields = json.loads(vector(key).split(b"\n")[0])
    del fields[missing]
    line = json.dumps(fields).encode()
    with refuses("J6"):
        READ[key](line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


def test_a_lease_without_an_anchor_says_null() -> None:
    lease = Lease(nonce="a" * 16, stream_id="0" * 32, version=3, anchor=None, seconds=1)
    assert json.loads(lease.to_bytes().split(b"\n")[0])["anchor"] is None
    assert Lease.from_bytes(lease.to_bytes(), key=lease.key) == lease


def test_keys(refuses: Callable) -> None:
    # rule K3
    assert parse_lease_key(lease_key("0123456789abcdef")) == "0123456789abcdef"
    assert parse_claim_key(claim_key(7)) == 7
    assert parse_fork_key(fork_key("0123456789abcdef")) == "0123456789abcdef"
    for key in ("forks/0123456789ABCDEF.json", "forks/0123456789abcdef", "forks/x/0123456789abcdef.json"):
        with refuses("K3"):
            parse_fork_key(key)
    for key in ("leases/0123456789ABCDEF.json", "leases/../x.json", "claims/7.json", f"claims/{2**60:020d}.json"):
        with refuses("K3"):
            (parse_lease_key if key.startswith("leases") else parse_claim_key)(key)


@pytest.mark.parametrize("changes", [{"root": "../other"}, {"root": "/x"}, {"root": ""}, {"successor_id": "0" * 32}])
def test_a_fork_lies_beside_its_stream_and_is_another_one(refuses: Callable, changes: dict[str, str]) -> None:
    # rule N6
    fields = {**json.loads(vector(f"forks/{3:016x}.json").split(b"\n")[0]), **changes}
    line = json.dumps(fields).encode()
    with refuses("N6"):
        READ[f"forks/{3:016x}.json"](line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
