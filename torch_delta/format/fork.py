"""forks/<nonce>.json: a note of a stream that a writer begins beside this one, made before anything lies there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError
from torch_delta.format.checks import Fields, broken, check_info, need_hex
from torch_delta.format.keys import fork_key, parse_fork_key, validate_key
from torch_delta.format.limits import FORMAT_VERSION, MAX_HINT_BYTES
from torch_delta.format.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkNote:
    """The object at ``forks/<nonce>.json`` of the stream that is to end (rule N6).

    Attributes:
        nonce: of the key; one per attempt.
        stream_id: of the stream that the fork is made from.
        root: where the new stream will lie, relative to the *parent* of this stream's root.
        successor_id: its stream id.
        info: for people (who forks).
    """

    nonce: str
    stream_id: str
    root: str
    successor_id: str
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where it is stored."""
        return fork_key(self.nonce)

    def __post_init__(self) -> None:
        key = self.key
        need_hex(self.stream_id, 32, rule="I2", key=key, what="stream_id")
        need_hex(self.successor_id, 32, rule="I2", key=key, what="successor_id")
        if self.successor_id == self.stream_id:
            raise broken("N6", key, "a stream cannot be its own successor")
        try:
            validate_key(self.root)
        except FormatError as error:
            raise broken("N6", key, f"root must be a key beside this stream: {error}") from error
        check_info(self.info, key=key)

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "root": self.root,
                "successor_id": self.successor_id,
                "info": dict(self.info),
            },
            key=self.key,
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> ForkNote:
        """Parse stored bytes.

        Raises:
            FormatError: the seal or a rule is broken.
        """
        fields = Fields(unseal(data, key=key, max_bytes=MAX_HINT_BYTES), key=key)
        fields.format_version()
        return cls(
            nonce=parse_fork_key(key),
            stream_id=fields.text("stream_id"),
            root=fields.text("root"),
            successor_id=fields.text("successor_id"),
            info=fields.text_map("info"),
        )
