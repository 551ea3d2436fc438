"""stream.json: the identity of a stream and the base it starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from torch_delta.format.checks import Fields, broken, check_features, check_info, need_hex
from torch_delta.format.digest import Digest, digests_hex
from torch_delta.format.keys import STREAM_KEY
from torch_delta.format.limits import FORMAT_NAME, FORMAT_VERSION, MAX_FEATURES, MAX_INFO_VALUE_BYTES
from torch_delta.format.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.format.schema import Schema

BaseKind = Literal["hf", "local", "anchor", "stream"]
BASE_KINDS: Final[tuple[str, ...]] = get_args(BaseKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseInfo:
    """Version 0. The digests identify it; the name only helps a person or a downloader to find it.

    Attributes:
        kind: ``hf`` (a Hub repository), ``local`` (a folder both sides have), ``anchor`` (anchor 0 of this stream) or
            ``stream`` (a version of another stream).
        name: repository id, label of the folder, nonce of the anchor, or id of the other stream.
        revision: commit of the repository, version of the other stream, or None.
        digests: of every tensor that is not an alias, in schema order.
    """

    kind: BaseKind
    name: str
    revision: str | None
    digests: tuple[Digest, ...]

    def __post_init__(self) -> None:
        if self.kind not in BASE_KINDS:
            raise broken("I3", STREAM_KEY, f"base.kind must be one of {', '.join(BASE_KINDS)}, got {self.kind!r}")
        for what, text in (("name", self.name), ("revision", self.revision or "")):
            if len(text.encode("utf-8", "surrogatepass")) > MAX_INFO_VALUE_BYTES:
                raise broken("I3", STREAM_KEY, f"base.{what} has at most {MAX_INFO_VALUE_BYTES} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """The object at ``stream.json``, created once and never changed.

    Attributes:
        stream_id: 32 random hex digits; every object of the stream repeats them.
        schema_id: sha256 of the schema.
        base: version 0.
        required_features: names a reader must know, see docs/format.md.
        absolute_only: no delta refers to old bits, so a receiver needs no copy of the weights.
        info: for people; no reader acts on it.
    """

    stream_id: str
    schema_id: str
    base: BaseInfo
    required_features: tuple[str, ...] = ()
    absolute_only: bool = False
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        need_hex(self.stream_id, 32, rule="I2", key=STREAM_KEY, what="stream_id")
        need_hex(self.schema_id, 64, rule="I2", key=STREAM_KEY, what="schema")
        check_features(self.required_features, key=STREAM_KEY)
        check_info(self.info, key=STREAM_KEY)

    def check_schema(self, schema: Schema) -> None:
        """Check that `schema` is the one this stream names and that the base has one digest per tensor with data.

        Raises:
            FormatError: rule I3 (digests) or S1 (another schema) is broken.
        """
        if schema.id != self.schema_id:
            raise broken("S1", STREAM_KEY, f"names schema {self.schema_id}, got {schema.id}")
        expected = len(schema.data_indices)
        if len(self.base.digests) != expected:
            raise broken("I3", STREAM_KEY, f"base has {len(self.base.digests)} digests, the schema {expected} tensors")

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format": FORMAT_NAME,
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "schema": self.schema_id,
                "base": {
                    "kind": self.base.kind,
                    "name": self.base.name,
                    "revision": self.base.revision,
                    "digests": digests_hex(self.base.digests),
                },
                "required_features": list(self.required_features),
                "absolute_only": self.absolute_only,
                "info": dict(self.info),
            },
            key=STREAM_KEY,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> StreamInfo:
        """Parse stored bytes.

        Raises:
            FormatError: the seal or a rule is broken.
            UnsupportedFormat: another major version, or an unknown required feature.
        """
        fields = Fields(unseal(data, key=STREAM_KEY), key=STREAM_KEY)
        name = fields.text("format")
        if name != FORMAT_NAME:
            raise broken(
                "I1", STREAM_KEY, f"format must be {FORMAT_NAME!r}, got {name[:80]!r}: not a stream of torch_delta"
            )
        fields.format_version()
        base = fields.inner("base")
        return cls(
            stream_id=fields.text("stream_id"),
            schema_id=fields.text("schema"),
            base=BaseInfo(
                kind=cast("BaseKind", base.text("kind")),
                name=base.text("name"),
                revision=base.text_or_none("revision"),
                digests=base.digests("digests"),
            ),
            required_features=tuple(fields.items("required_features", str, max_items=MAX_FEATURES, rule="I4")),
            absolute_only=fields.boolean("absolute_only"),
            info=fields.text_map("info"),
        )
