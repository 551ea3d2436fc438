"""`stream.json` and the schema: creating them, loading them, and telling whether another object belongs to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.crashpoints import reach
from torch_delta.errors import Fenced, FormatError, ObjectExists, ObjectNotFound
from torch_delta.format.checks import broken
from torch_delta.format.keys import STREAM_KEY, schema_key
from torch_delta.format.limits import MAX_JSON_BYTES
from torch_delta.format.schema import Schema
from torch_delta.format.sealed import sha256_hex
from torch_delta.format.streaminfo import StreamInfo

if TYPE_CHECKING:
    from torch_delta.store.base import Store


@dataclass(frozen=True, slots=True)
class Identity:
    """What every object of a stream must agree with.

    Attributes:
        url: of the store, for messages.
        info: `stream.json`.
        schema: the tensor table it names.
        sha256: of the stored bytes of `stream.json`: the parent of version 1.
    """

    url: str
    info: StreamInfo
    schema: Schema
    sha256: str

    def check(self, key: str, stream_id: str, schema_id: str | None = None) -> None:
        """Refuse an object of another stream (rule I2) or of other tensors (rule S1).

        Raises:
            FormatError: it is one.
        """
        if stream_id != self.info.stream_id:
            raise broken(
                "I2",
                key,
                f"belongs to stream {stream_id}, {STREAM_KEY} of {self.url} says {self.info.stream_id}: two streams "
                "were written to one place, or it was emptied and used again. Use one URL per stream; a reader starts "
                "again in an empty folder",
                expected=self.info.stream_id,
                got=stream_id,
            )
        if schema_id is not None and schema_id != self.info.schema_id:
            raise broken(
                "S1",
                key,
                f"names schema {schema_id}, the stream has {self.info.schema_id}",
                expected=self.info.schema_id,
                got=schema_id,
            )


def read_json(store: Store, key: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Bytes of a small object; one above its bound is refused before it is read (rule J5)."""
    try:
        return store.get(key, max_bytes=max_bytes)
    except FormatError as error:
        raise broken(
            "J5",
            key,
            f"at most {max_bytes} bytes are read, got {error.facts.get('got')}",
            expected=max_bytes,
            got=error.facts.get("got"),
        ) from error


def create_identity(store: Store, info: StreamInfo, schema: Schema) -> Identity:
    """Write the schema, then `stream.json`; see `Stream.create`."""
    info.check_schema(schema)
    key = schema_key(schema.id)
    try:
        store.create_or_same(key, schema.to_bytes())
    except ObjectExists as error:
        raise broken("S1", key, "holds other bytes than its name promises: damaged") from error
    reach("stream.schema_written")
    stored = info.to_bytes()
    try:
        store.create_or_same(STREAM_KEY, stored)
    except ObjectExists as error:
        raise _foreign(store, info) from error
    reach("stream.info_written")
    return Identity(store.url, info, schema, sha256_hex(stored))


def load_identity(store: Store) -> Identity:
    """Read `stream.json` and its schema; see `Stream.load`."""
    try:
        stored = read_json(store, STREAM_KEY)
    except ObjectNotFound as error:
        raise ObjectNotFound(
            f"{store.url}: there is no stream here ({STREAM_KEY} does not exist). Check the URL, or wait until its "
            "writer has started",
            key=STREAM_KEY,
            url=store.url,
            operation="load",
        ) from error
    info = StreamInfo.from_bytes(stored)
    key = schema_key(info.schema_id)
    try:
        schema = Schema.from_bytes(read_json(store, key), schema_id=info.schema_id)
    except ObjectNotFound as error:
        # Not ObjectNotFound: a writer would take that for "no stream here" and start another one.
        raise broken("S1", STREAM_KEY, f"names {key}, which does not exist: it was deleted") from error
    info.check_schema(schema)
    return Identity(store.url, info, schema, sha256_hex(stored))


def _foreign(store: Store, info: StreamInfo) -> Fenced:
    try:
        owner = StreamInfo.from_bytes(read_json(store, STREAM_KEY)).stream_id
    except FormatError as error:
        owner = f"unknown, {STREAM_KEY} cannot be read: {error}"
    return Fenced(
        f"{store.url} holds stream {owner}, not the new stream {info.stream_id}. Use an empty place for a new stream, "
        "or attach to the one that is there",
        version=0,
        owner=owner,
        key=STREAM_KEY,
    )
