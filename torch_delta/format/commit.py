"""Commits: the small object whose existence is a version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.format.checks import Fields, broken, check_features, check_info, need_hex, need_int53, need_range
from torch_delta.format.keys import commit_key, parse_commit_key, parse_part_key
from torch_delta.format.limits import FORMAT_VERSION, MAX_FEATURES, MAX_PARTS, MAX_SLICES
from torch_delta.format.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """How a commit names one of its parts.

    Attributes:
        key: of the part's object.
        stored_bytes: its size.
        sha256: of its stored bytes, hex.
        rank: the sender's rank.
        num_slices: slices in the part, at least 1 (a sender without changes uploads nothing).
        num_changed: elements its slices set.
    """

    key: str
    stored_bytes: int
    sha256: str
    rank: int
    num_slices: int
    num_changed: int

    def __post_init__(self) -> None:
        name = parse_part_key(self.key)
        if name.rank != self.rank:
            raise broken("C3", self.key, f"the key says rank {name.rank}, the reference {self.rank}")
        need_hex(self.sha256, 64, rule="C3", key=self.key, what="sha256")
        need_int53(self.stored_bytes, rule="C3", key=self.key, what="bytes")
        need_range(self.num_slices, 1, MAX_SLICES, rule="C3", key=self.key, what="slices")
        need_int53(self.num_changed, rule="C3", key=self.key, what="changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The object at ``commits/<version>.json``.

    Attributes:
        stream_id: of the stream.
        version: 1 or more.
        parent_sha256: of the stored bytes of the previous commit, or of ``stream.json`` for version 1: a hash chain.
        schema_id: of the stream's schema.
        parts: sorted by key; empty for a version in which nothing changed.
        state_sha256: `digest.state_sha256` of the whole state at this version.
        num_changed: elements set by all parts together.
        required_features: names a reader must know.
        info: for people; no reader acts on it.
    """

    stream_id: str
    version: int
    parent_sha256: str
    schema_id: str
    parts: tuple[PartRef, ...]
    state_sha256: str
    num_changed: int
    required_features: tuple[str, ...] = ()
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where it is stored."""
        return commit_key(self.version)

    def __post_init__(self) -> None:
        key = self.key
        need_hex(self.stream_id, 32, rule="I2", key=key, what="stream_id")
        need_hex(self.schema_id, 64, rule="I2", key=key, what="schema")
        need_hex(self.parent_sha256, 64, rule="C2", key=key, what="parent_sha256")
        need_hex(self.state_sha256, 64, rule="C5", key=key, what="state_sha256")
        check_features(self.required_features, key=key)
        check_info(self.info, key=key)
        if len(self.parts) > MAX_PARTS:
            raise broken("C3", key, f"at most {MAX_PARTS} parts, got {len(self.parts)}")
        previous = ""
        for part in self.parts:
            if parse_part_key(part.key).version != self.version:
                raise broken("C3", key, f"names a part of another version: {part.key}", part=part.key)
            if part.key <= previous:
                raise broken(
                    "C3", key, f"parts are sorted by key, each once; {part.key} follows {previous}", part=part.key
                )
            previous = part.key
        total = sum(part.num_changed for part in self.parts)
        if total != self.num_changed:
            raise broken("C4", key, f"changed is {self.num_changed}, its parts add up to {total}")

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "version": self.version,
                "parent_sha256": self.parent_sha256,
                "schema": self.schema_id,
                "parts": [
                    {
                        "key": part.key,
                        "bytes": part.stored_bytes,
                        "sha256": part.sha256,
                        "rank": part.rank,
                        "slices": part.num_slices,
                        "changed": part.num_changed,
                    }
                    for part in self.parts
                ],
                "state_sha256": self.state_sha256,
                "changed": self.num_changed,
                "required_features": list(self.required_features),
                "info": dict(self.info),
            },
            key=self.key,
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> Commit:
        """Parse stored bytes.

        Args:
            data: the stored object.
            key: where it was found; must be the key of the version it claims to be.

        Raises:
            FormatError: the seal or a rule is broken.
            UnsupportedFormat: another major version, or an unknown required feature.
        """
        fields = Fields(unseal(data, key=key), key=key)
        fields.format_version()
        features = tuple(fields.items("required_features", str, max_items=MAX_FEATURES, rule="I4"))
        check_features(features, key=key)  # first: a feature may change the meaning of all that follows
        version = fields.integer("version")
        if parse_commit_key(key) != version:
            raise broken("C1", key, f"claims to be version {version}")
        return cls(
            stream_id=fields.text("stream_id"),
            version=version,
            parent_sha256=fields.text("parent_sha256"),
            schema_id=fields.text("schema"),
            parts=tuple(
                _part(Fields(entry, key=key, where=f"parts[{at}]."))
                for at, entry in enumerate(fields.items("parts", dict, max_items=MAX_PARTS, rule="C3"))
            ),
            state_sha256=fields.text("state_sha256"),
            num_changed=fields.integer("changed"),
            required_features=features,
            info=fields.text_map("info"),
        )


def _part(fields: Fields) -> PartRef:
    return PartRef(
        key=fields.text("key"),
        stored_bytes=fields.integer("bytes"),
        sha256=fields.text("sha256"),
        rank=fields.integer("rank"),
        num_slices=fields.integer("slices"),
        num_changed=fields.integer("changed"),
    )
