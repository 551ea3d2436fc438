"""Small streams to read, write and damage. Damage goes past the store, into the dictionary of a `MemoryStore`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from torch_delta.format.anchor import AnchorFile, AnchorManifest
from torch_delta.format.commit import Commit, PartRef
from torch_delta.format.digest import Digest
from torch_delta.format.keys import part_key
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.format.streaminfo import BaseInfo, StreamInfo

if TYPE_CHECKING:
    from torch_delta.store import MemoryStore
    from torch_delta.stream import Stream

STREAM_ID = "0123456789abcdef" * 2
OTHER_ID = "fedcba9876543210" * 2
NONCE = "00112233aabbccdd"
SCHEMA = Schema(
    (TensorSpec("a", "BF16", (2, 2)), TensorSpec("b", "F32", (3,)), TensorSpec("c", "F32", (3,), alias_of="b"))
)
DIGESTS = (Digest.ZERO, Digest.ZERO)


def make_info(stream_id: str = STREAM_ID, schema: Schema = SCHEMA) -> StreamInfo:
    return StreamInfo(
        stream_id=stream_id,
        schema_id=schema.id,
        base=BaseInfo(kind="local", name="base", revision=None, digests=DIGESTS),
    )


def make_commit(
    version: int, parent_sha256: str, *, stream_id: str = STREAM_ID, nonce: str = "ours", **changes
) -> Commit:
    part = PartRef(
        key=part_key(version, 0, 0, NONCE), stored_bytes=10, sha256="0" * 64, rank=0, num_slices=1, num_changed=3
    )
    fields = {
        "stream_id": stream_id,
        "version": version,
        "parent_sha256": parent_sha256,
        "schema_id": SCHEMA.id,
        "parts": (part,),
        "state_sha256": f"{version:064x}",
        "num_changed": 3,
        "info": {"nonce": nonce},
    }
    return Commit(**{**fields, **changes})


def make_anchor(
    version: int, commit_sha256: str | None, *, nonce: str = NONCE, stream_id: str = STREAM_ID
) -> AnchorManifest:
    name = "model.safetensors"
    return AnchorManifest(
        stream_id=stream_id,
        version=version,
        commit_sha256=commit_sha256,
        schema_id=SCHEMA.id,
        files=(AnchorFile(name=name, key=f"anchors/{version:020d}-{nonce}/{name}", stored_bytes=1, sha256="1" * 64),),
        tensor_files={"a": name, "b": name},
        digests=DIGESTS,
    )


def seal(value: dict) -> bytes:
    """Sealed bytes by hashlib and json alone."""
    line = json.dumps(value).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def fields_of(stored: bytes) -> dict:
    return json.loads(stored.splitlines()[0])


def raw(store: MemoryStore) -> dict[str, bytes]:
    return {key: data for key, (data, _) in store._shelf.objects.items()}


def raw_put(store: MemoryStore, key: str, data: bytes) -> None:
    store._shelf.objects[key] = (data, 0.0)


def raw_delete(store: MemoryStore, *keys: str) -> None:
    for key in keys:
        del store._shelf.objects[key]


def commit_key(version: int) -> str:
    return f"commits/{version:020d}.json"


def write_chain(stream: Stream, first: int, last: int, *, hint: bool = True) -> list[str]:
    """Commit versions first..last; the sha256 of each."""
    sha256s = []
    for version in range(first, last + 1):
        parent = stream.info_sha256 if version == 1 else stream.commit(version - 1).sha256
        sha256s.append(stream.write_commit(make_commit(version, parent)))
        if hint:
            stream.write_head(version, sha256s[-1])
    return sha256s
