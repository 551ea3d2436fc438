"""Names of the objects of a stream: builders, parsers and the grammar every key passes before it is used.

stream.json                                          identity; created once
schema/<sha256>.json                                 the tensor table
parts/<v20>/<rank5>-<seq4>-<nonce16>.safetensors     one sender's payload
commits/<v20>.json                                   its existence is the version
anchors/<v20>-<nonce16>/<file>                       a Hugging Face checkpoint folder
anchors/<v20>-<nonce16>.json                         the anchor's manifest, written last
head.json                                            a hint where the newest version is
successor.json                                       where the stream goes on
leases/<nonce16>.json                                what a reader still needs
claims/<v20>.json                                    who deletes
forks/<nonce16>.json                                 a stream that a writer begins beside this one

Only the hint, leases and claims are ever overwritten.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Final

from torch_delta.format.checks import broken, is_hex, need_hex, need_range
from torch_delta.format.limits import MAX_INT, MAX_KEY_BYTES, MAX_RANK, MAX_SEGMENT_BYTES, MAX_SEQ

STREAM_KEY: Final = "stream.json"
HEAD_KEY: Final = "head.json"
SUCCESSOR_KEY: Final = "successor.json"
SCHEMA_PREFIX: Final = "schema/"
PARTS_PREFIX: Final = "parts/"
COMMITS_PREFIX: Final = "commits/"
ANCHORS_PREFIX: Final = "anchors/"
LEASES_PREFIX: Final = "leases/"
CLAIMS_PREFIX: Final = "claims/"
FORKS_PREFIX: Final = "forks/"

_SEGMENT: Final = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
_FILE_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_ANCHOR_FOLDER: Final = re.compile(r"[0-9]{20}-[0-9a-f]{16}")
_COMMIT: Final = re.compile(r"commits/([0-9]{20})\.json")
_PART: Final = re.compile(r"parts/([0-9]{20})/([0-9]{5})-([0-9]{4})-([0-9a-f]{16})\.safetensors")
_LEASE: Final = re.compile(r"leases/([0-9a-f]{16})\.json")
_CLAIM: Final = re.compile(r"claims/([0-9]{20})\.json")
_FORK: Final = re.compile(r"forks/([0-9a-f]{16})\.json")
_MANIFEST: Final = re.compile(r"anchors/([0-9]{20})-([0-9a-f]{16})\.json")
_ANCHOR_FILE: Final = re.compile(r"anchors/([0-9]{20})-([0-9a-f]{16})/([A-Za-z0-9_-][A-Za-z0-9._-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """What the key of a part says."""

    version: int
    rank: int
    seq: int
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorKey:
    """What the key of an anchor's manifest, or of a file in its folder, says."""

    version: int
    nonce: str
    file: str | None = None


def validate_key(key: str) -> str:
    """Return `key` if it matches the grammar (rules K1 and K2): no key can climb out of the stream's root.

    Raises:
        FormatError: it does not.
    """
    if len(key) > MAX_KEY_BYTES:
        raise broken("K2", repr(key[:80]), f"a key has at most {MAX_KEY_BYTES} bytes, got {len(key)}")
    segments = key.split("/")
    in_anchor = len(segments) == 3 and segments[0] == "anchors" and _ANCHOR_FOLDER.fullmatch(segments[1]) is not None
    for at, segment in enumerate(segments):
        grammar = _FILE_SEGMENT if in_anchor and at == 2 else _SEGMENT
        if grammar.fullmatch(segment) is None:
            raise broken("K1", repr(key), f"segment {segment!r} does not match {grammar.pattern}")
        if len(segment) > MAX_SEGMENT_BYTES:
            raise broken("K2", repr(key), f"a segment has at most {MAX_SEGMENT_BYTES} bytes, got {len(segment)}")
    return key


def is_file_name(name: str) -> bool:
    """Whether a file of an anchor may have this name."""
    return len(name) <= MAX_SEGMENT_BYTES and _FILE_SEGMENT.fullmatch(name) is not None


def new_nonce() -> str:
    """Sixteen random hex digits: what makes a name unique for ever (rule K5)."""
    return secrets.token_hex(8)


def new_stream_id() -> str:
    """Thirty-two random hex digits."""
    return secrets.token_hex(16)


def version_name(version: int) -> str:
    """The version as 20 digits, so that a listing is in order.

    Raises:
        FormatError: negative, or above 2**53 - 1.
    """
    need_range(version, 0, MAX_INT, rule="K3", key="key", what="version")
    return f"{version:020d}"


def schema_key(schema_id: str) -> str:
    """Key of the schema with this sha256."""
    need_hex(schema_id, 64, rule="K3", key="schema key", what="schema id")
    return f"schema/{schema_id}.json"


def parts_prefix(version: int) -> str:
    """Prefix of all parts of a version."""
    return f"parts/{version_name(version)}/"


def part_key(version: int, rank: int, seq: int, nonce: str) -> str:
    """Key of a part: the `seq`-th of sender `rank` for `version`; `nonce` from `new_nonce`."""
    need_range(version, 1, MAX_INT, rule="K3", key="part key", what="version")
    need_range(rank, 0, MAX_RANK, rule="K3", key="part key", what="rank")
    need_range(seq, 0, MAX_SEQ, rule="K3", key="part key", what="seq")
    need_hex(nonce, 16, rule="K3", key="part key", what="nonce")
    return f"{parts_prefix(version)}{rank:05d}-{seq:04d}-{nonce}.safetensors"


def commit_key(version: int) -> str:
    """Key of the commit of a version; version 0 has none."""
    need_range(version, 1, MAX_INT, rule="K3", key="commit key", what="version")
    return f"commits/{version_name(version)}.json"


def anchor_key(version: int, nonce: str) -> str:
    """Key of an anchor's manifest."""
    return f"{_anchor_stem(version, nonce)}.json"


def anchor_prefix(version: int, nonce: str) -> str:
    """Prefix of an anchor's folder."""
    return f"{_anchor_stem(version, nonce)}/"


def anchor_file_key(version: int, nonce: str, file: str) -> str:
    """Key of one file in an anchor's folder."""
    return validate_key(f"{anchor_prefix(version, nonce)}{file}")


def _anchor_stem(version: int, nonce: str) -> str:
    need_hex(nonce, 16, rule="K3", key="anchor key", what="nonce")
    return f"anchors/{version_name(version)}-{nonce}"


def parse_schema_key(key: str) -> str:
    """The schema id of a schema's key.

    Raises:
        FormatError: not the key of a schema.
    """
    schema_id = key.removeprefix(SCHEMA_PREFIX).removesuffix(".json")
    if not is_hex(schema_id, 64) or key != f"{SCHEMA_PREFIX}{schema_id}.json":
        raise broken("K3", repr(key[:80]), "not the key of a schema: schema/<64 hex digits>.json")
    return schema_id


def parse_commit_key(key: str) -> int:
    """The version of a commit's key.

    Raises:
        FormatError: not the key of a commit.
    """
    match = _COMMIT.fullmatch(key)
    if match is None or not 1 <= int(match[1]) <= MAX_INT:
        raise broken("K3", repr(key[:80]), "not the key of a commit: commits/<20 digits>.json, from version 1")
    return int(match[1])


def parse_part_key(key: str) -> PartKey:
    """What a part's key says.

    Raises:
        FormatError: not the key of a part.
    """
    match = _PART.fullmatch(key)
    if match is None or not 1 <= int(match[1]) <= MAX_INT:
        raise broken("K3", repr(key[:80]), "not the key of a part: parts/<20 digits>/<5>-<4>-<16 hex>.safetensors")
    return PartKey(version=int(match[1]), rank=int(match[2]), seq=int(match[3]), nonce=match[4])


def parse_anchor_key(key: str) -> AnchorKey:
    """What the key of an anchor's manifest says.

    Raises:
        FormatError: not the key of an anchor's manifest.
    """
    match = _MANIFEST.fullmatch(key)
    if match is None or int(match[1]) > MAX_INT:
        raise broken("K3", repr(key[:80]), "not the key of an anchor: anchors/<20 digits>-<16 hex>.json")
    return AnchorKey(version=int(match[1]), nonce=match[2])


def parse_anchor_file_key(key: str) -> AnchorKey:
    """What the key of a file in an anchor's folder says.

    Raises:
        FormatError: not the key of such a file.
    """
    match = _ANCHOR_FILE.fullmatch(key)
    if match is None or int(match[1]) > MAX_INT:
        raise broken("K3", repr(key[:80]), "not a file of an anchor: anchors/<20 digits>-<16 hex>/<file>")
    validate_key(key)
    return AnchorKey(version=int(match[1]), nonce=match[2], file=match[3])


def lease_key(nonce: str) -> str:
    """Key of a reader's lease."""
    need_hex(nonce, 16, rule="K3", key="lease key", what="nonce")
    return f"{LEASES_PREFIX}{nonce}.json"


def parse_lease_key(key: str) -> str:
    """The nonce of a lease's key.

    Raises:
        FormatError: not the key of a lease.
    """
    match = _LEASE.fullmatch(key)
    if match is None:
        raise broken("K3", repr(key[:80]), "not the key of a lease: leases/<16 hex>.json")
    return match[1]


def claim_key(number: int) -> str:
    """Key of the `number`-th claim to delete."""
    return f"{CLAIMS_PREFIX}{version_name(number)}.json"


def parse_claim_key(key: str) -> int:
    """The number of a claim's key.

    Raises:
        FormatError: not the key of a claim.
    """
    match = _CLAIM.fullmatch(key)
    if match is None or int(match[1]) > MAX_INT:
        raise broken("K3", repr(key[:80]), "not the key of a claim: claims/<20 digits>.json")
    return int(match[1])


def fork_key(nonce: str) -> str:
    """Key of the note of a fork that is being made."""
    need_hex(nonce, 16, rule="K3", key="fork key", what="nonce")
    return f"{FORKS_PREFIX}{nonce}.json"


def parse_fork_key(key: str) -> str:
    """The nonce of such a note's key.

    Raises:
        FormatError: not the key of one.
    """
    match = _FORK.fullmatch(key)
    if match is None:
        raise broken("K3", repr(key[:80]), "not the key of a note of a fork: forks/<16 hex>.json")
    return match[1]
