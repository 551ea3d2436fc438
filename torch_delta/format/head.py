"""head.json, a hint where the newest version is; successor.json, where the stream goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError
from torch_delta.format.checks import Fields, broken, check_info, need_hex, need_int53, need_range
from torch_delta.format.keys import HEAD_KEY, SUCCESSOR_KEY, validate_key
from torch_delta.format.limits import FORMAT_VERSION, MAX_HINT_BYTES, MAX_LEASE_SECONDS
from torch_delta.format.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of life of the writer that wrote the hint (rule H2). No reader acts on it.

    Attributes:
        writer: 16 hex digits, drawn when it attached.
        seconds: after this long without a new sign it counts as dead; 0: it said goodbye.
        beat: grows with every sign, so that two of them never have the same bytes.
        info: for people: who it is.
    """

    writer: str
    seconds: int
    beat: int
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_hex(self.writer, 16, rule="H2", key=HEAD_KEY, what="sign.writer")
        need_range(self.seconds, 0, MAX_LEASE_SECONDS, rule="H2", key=HEAD_KEY, what="sign.seconds")
        need_int53(self.beat, rule="H2", key=HEAD_KEY, what="sign.beat")
        check_info(self.info, key=HEAD_KEY)

    @property
    def owner(self) -> str:
        """Who wrote it, in words."""
        return ", ".join(f"{name} {value}" for name, value in sorted(self.info.items())) or f"writer {self.writer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The object at ``head.json``: the only one that is overwritten. It may be stale, absent or damaged.

    Attributes:
        stream_id: of the stream.
        version: the last version its writer committed.
        commit_sha256: of that commit's stored bytes; of ``stream.json`` for version 0.
        sign: of life of its writer, or None where it gives none.
    """

    stream_id: str
    version: int
    commit_sha256: str
    sign: Sign | None = None

    def __post_init__(self) -> None:
        need_hex(self.stream_id, 32, rule="I2", key=HEAD_KEY, what="stream_id")
        need_int53(self.version, rule="H1", key=HEAD_KEY, what="version")
        need_hex(self.commit_sha256, 64, rule="H1", key=HEAD_KEY, what="commit_sha256")

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        said: dict[str, object] = {
            "format_version": list(FORMAT_VERSION),
            "stream_id": self.stream_id,
            "version": self.version,
            "commit_sha256": self.commit_sha256,
        }
        if self.sign is not None:
            said["sign"] = {
                "writer": self.sign.writer,
                "seconds": self.sign.seconds,
                "beat": self.sign.beat,
                "info": dict(self.sign.info),
            }
        return seal(said, key=HEAD_KEY)

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        """Parse stored bytes. A reader treats every error as 'no hint' (rule H1).

        Raises:
            FormatError: the seal or a rule is broken.
        """
        fields = Fields(unseal(data, key=HEAD_KEY, max_bytes=MAX_HINT_BYTES), key=HEAD_KEY)
        fields.format_version()
        return cls(
            stream_id=fields.text("stream_id"),
            version=fields.integer("version"),
            commit_sha256=fields.text("commit_sha256"),
            sign=_read_sign(fields),
        )


def _read_sign(fields: Fields) -> Sign | None:
    if fields.values.get("sign") is None:
        return None
    inner = fields.inner("sign")
    return Sign(
        writer=inner.text("writer"),
        seconds=inner.integer("seconds"),
        beat=inner.integer("beat"),
        info=inner.text_map("info"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """The object at ``successor.json``, created once: it ends this stream and fences its writer.

    Attributes:
        stream_id: of the stream that ends.
        version: the version the successor forks from; later versions of this stream are not part of its history.
        commit_sha256: of that version's commit; of ``stream.json`` for version 0.
        root: where the successor lies, as a key relative to the *parent* of this stream's root, so that a reader never
            leaves the place it was told to read from.
        successor_id: stream id of the successor.
        info: for people; no reader acts on it.
    """

    stream_id: str
    version: int
    commit_sha256: str
    root: str
    successor_id: str
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_hex(self.stream_id, 32, rule="I2", key=SUCCESSOR_KEY, what="stream_id")
        need_hex(self.successor_id, 32, rule="I2", key=SUCCESSOR_KEY, what="successor_id")
        need_int53(self.version, rule="N1", key=SUCCESSOR_KEY, what="version")
        need_hex(self.commit_sha256, 64, rule="N1", key=SUCCESSOR_KEY, what="commit_sha256")
        if self.successor_id == self.stream_id:
            raise broken("N2", SUCCESSOR_KEY, "a stream cannot be its own successor")
        try:
            validate_key(self.root)
        except FormatError as error:
            raise broken("N2", SUCCESSOR_KEY, f"root must be a key beside this stream: {error}") from error
        check_info(self.info, key=SUCCESSOR_KEY)

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "version": self.version,
                "commit_sha256": self.commit_sha256,
                "root": self.root,
                "successor_id": self.successor_id,
                "info": dict(self.info),
            },
            key=SUCCESSOR_KEY,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Successor:
        """Parse stored bytes.

        Raises:
            FormatError: the seal or a rule is broken.
            UnsupportedFormat: another major version.
        """
        fields = Fields(unseal(data, key=SUCCESSOR_KEY, max_bytes=MAX_HINT_BYTES), key=SUCCESSOR_KEY)
        fields.format_version()
        return cls(
            stream_id=fields.text("stream_id"),
            version=fields.integer("version"),
            commit_sha256=fields.text("commit_sha256"),
            root=fields.text("root"),
            successor_id=fields.text("successor_id"),
            info=fields.text_map("info"),
        )
