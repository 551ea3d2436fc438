"""Leases, by which readers say what they still need, and claims, by which deleters keep out of each other's way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.format.checks import Fields, check_info, need_hex, need_int53, need_range
from torch_delta.format.keys import claim_key, lease_key, parse_anchor_key, parse_claim_key, parse_lease_key
from torch_delta.format.limits import FORMAT_VERSION, MAX_HINT_BYTES, MAX_LEASE_SECONDS
from torch_delta.format.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The object at ``leases/<nonce>.json``; only its reader overwrites it (rule L2).

    Attributes:
        nonce: of the key; one per reader.
        stream_id: of the stream.
        version: the reader stands at it; what follows must stay.
        anchor: key of the manifest of an anchor that it is reading, or None.
        seconds: it is live for, after it was last written.
        info: for people (who reads).
    """

    nonce: str
    stream_id: str
    version: int
    anchor: str | None
    seconds: int
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where it is stored."""
        return lease_key(self.nonce)

    def __post_init__(self) -> None:
        key = self.key
        need_hex(self.stream_id, 32, rule="I2", key=key, what="stream_id")
        need_int53(self.version, rule="L2", key=key, what="version")
        need_range(self.seconds, 1, MAX_LEASE_SECONDS, rule="L2", key=key, what="seconds")
        if self.anchor is not None:
            parse_anchor_key(self.anchor)
        check_info(self.info, key=key)

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "version": self.version,
                "anchor": self.anchor,
                "seconds": self.seconds,
                "info": dict(self.info),
            },
            key=self.key,
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> Lease:
        """Parse stored bytes; every error means that there is no lease (rule L2).

        Raises:
            FormatError: the seal or a rule is broken.
        """
        fields = Fields(unseal(data, key=key, max_bytes=MAX_HINT_BYTES), key=key)
        fields.format_version()
        return cls(
            nonce=parse_lease_key(key),
            stream_id=fields.text("stream_id"),
            version=fields.integer("version"),
            anchor=fields.text_or_none("anchor"),
            seconds=fields.integer("seconds"),
            info=fields.text_map("info"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The object at ``claims/<number>.json`` (rule L4).

    Attributes:
        number: of the key.
        stream_id: of the stream.
        seconds: others keep away for, after it was written.
        done: the deleter has finished.
        info: for people (who deletes), and a nonce.
    """

    number: int
    stream_id: str
    seconds: int
    done: bool
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where it is stored."""
        return claim_key(self.number)

    def __post_init__(self) -> None:
        key = self.key
        need_hex(self.stream_id, 32, rule="I2", key=key, what="stream_id")
        need_range(self.seconds, 1, MAX_LEASE_SECONDS, rule="L4", key=key, what="seconds")
        check_info(self.info, key=key)

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "seconds": self.seconds,
                "done": self.done,
                "info": dict(self.info),
            },
            key=self.key,
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> Claim:
        """Parse stored bytes.

        Raises:
            FormatError: the seal or a rule is broken.
        """
        fields = Fields(unseal(data, key=key, max_bytes=MAX_HINT_BYTES), key=key)
        fields.format_version()
        return cls(
            number=parse_claim_key(key),
            stream_id=fields.text("stream_id"),
            seconds=fields.integer("seconds"),
            done=fields.boolean("done"),
            info=fields.text_map("info"),
        )
