"""A store in a bucket of S3 (and what speaks its protocol), Google Cloud Storage or Azure, through obstore.

Reads of more than one chunk go in parallel ranges (`object_read`), writes are conditional or streamed (`object_write`).
Every operation has a deadline and repeats only what is safe to repeat (`calls`, `object_answers`);
docs/stores.md lists limits, credentials and endpoints (`object_config`).
"""

from __future__ import annotations

import threading
from itertools import chain
from typing import TYPE_CHECKING

from torch_delta.errors import ObjectNotFound, StoreUnavailable
from torch_delta.format.keys import validate_key
from torch_delta.store.base import BytesLike, Data, ObjectInfo, Store, views
from torch_delta.store.calls import Call
from torch_delta.store.keycheck import check_prefix, is_key, range_error
from torch_delta.store.object_answers import OBSTORE
from torch_delta.store.object_config import ObjectConfig, endpoint_of, make_client, parse_url
from torch_delta.store.object_read import Reader
from torch_delta.store.object_write import Writer
from torch_delta.store.sibling import sibling_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from obstore import ObjectMeta

_NUM_CHUNK_RETRIES = 8
_LIST_PAGE = 1000


class ObjectStore(Store):
    """Objects below a prefix of a bucket.

    Opening sends no request. A process that forks must open its own store afterwards: connections and threads do not
    survive a fork.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        config: limits; None for the defaults.

    Raises:
        TorchDeltaError: a malformed URL, a missing extra, or settings that are refused.
    """

    def __init__(self, url: str, *, config: ObjectConfig | None = None) -> None:
        self._location = parse_url(url)
        self._config = config if config is not None else ObjectConfig()
        self._stop = threading.Event()
        self._client = make_client(self._location, self._config, is_reading=True, num_retries=0)
        self._reader = Reader(self._client, self._config, self._stop)
        self._overwriter = make_client(self._location, self._config, is_reading=False, num_retries=0)
        self._writer = Writer(
            conditional=self._overwriter,
            uploader=make_client(self._location, self._config, is_reading=False, num_retries=_NUM_CHUNK_RETRIES),
            reader=self._reader,
            config=self._config,
        )
        # The clouds list by the bytes of the keys and so can start after one. Compatible servers may walk folders, and
        # Azure's hierarchical accounts and S3's directory buckets do: there we read all and sort.
        self._starts_after = (
            self._location.scheme != "az"
            and not self._location.bucket.endswith("--x-s3")
            and endpoint_of(self._location.scheme, self._config) is None
        )

    @property
    def url(self) -> str:
        """``scheme://bucket/prefix``, without endpoint and credentials."""
        return self._location.url

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """The first chunk tells the size; the rest follows in parallel."""
        validate_key(key)
        call = self._call("get", key)
        size_bytes, first = self._reader.first(call, max_bytes)
        if size_bytes <= len(first):
            return first.to_bytes()
        return self._reader.span(call, len(first), size_bytes, first)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """One ranged request, or parallel ones above a chunk."""
        validate_key(key)
        if start < 0 or length < 0:
            raise ValueError(f"start and length must not be negative, got {start} and {length}")
        call = self._call("get_range", key)
        if length == 0:
            size_bytes = self._reader.look(call)[0].size_bytes
            if start > size_bytes:
                raise range_error(self.url, key, start, length, size_bytes)
            return b""
        return self._reader.span(call, start, start + length)

    def stat(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        validate_key(key)
        return self._reader.look(self._call("stat", key))[0]

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """All pages are read before the first object is yielded, then sorted: an error never follows half an answer."""
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def _list(self, prefix: str, start_after: str | None) -> Iterator[ObjectInfo]:
        import obstore

        offset = start_after if start_after is not None and self._starts_after and is_key(start_after) else None

        def all_pages() -> Sequence[ObjectInfo]:
            pages = obstore.list(self._client, prefix or None, offset=offset, chunk_size=_LIST_PAGE)
            return [_info(meta) for meta in chain.from_iterable(pages) if is_key(meta["path"])]

        try:
            found = self._call("list", prefix).repeat(all_pages)
        except ObjectNotFound as error:  # a listing has no such answer
            raise StoreUnavailable(
                f"{self.url}: list {prefix or '(root)'} was answered with 'not found'. Check bucket and endpoint",
                key=prefix,
                url=self.url,
                operation="list",
                outcome="absent",
            ) from error
        self._reader.saw_bucket()
        for info in sorted(found, key=lambda info: info.key):  # keys are ASCII: as by their bytes
            if info.key.startswith(prefix) and (start_after is None or info.key > start_after):
                yield info

    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """Conditional up to `single_put_bytes` (an iterable: `chunk_bytes`), streamed beyond that."""
        validate_key(key)
        call = self._call("put_new", key, unclear="unknown")
        if isinstance(data, bytes | bytearray | memoryview | tuple):
            pieces = [*views(data)]
            size_bytes = sum(len(piece) for piece in pieces)
            if size_bytes <= self._config.single_put_bytes:
                return self._writer.create(call, b"".join(pieces))
            return self._writer.stream(call, self._cut(iter(pieces)))
        cut = self._cut(views(data))
        head: list[bytes] = []
        head_bytes = 0
        for piece in cut:
            head.append(piece)
            head_bytes += len(piece)
            if head_bytes > self._config.chunk_bytes:
                return self._writer.stream(call.again(), chain(head, cut))
        # The pieces may have taken long to come: the time for the request starts now.
        return self._writer.create(call.again(), b"".join(head))

    def copy(self, source: str, key: str) -> ObjectInfo | None:
        """One request that the service carries out; None for what it refuses to copy, such as 5 GB and more on S3."""
        validate_key(source)
        validate_key(key)
        return self._writer.copy(self._call("copy", source), self._call("copy", key))

    def sibling(self, root: str) -> ObjectStore:
        """The same bucket and settings; clients of its own."""
        return ObjectStore(sibling_url(self.url, root), config=self._config)

    def put_hint(self, key: str, data: BytesLike) -> None:
        """An unconditional put, repeated until it is answered."""
        import obstore

        validate_key(key)
        content = bytes(data)
        self._call("put_hint", key, unclear="unknown").repeat(
            lambda: obstore.put(self._overwriter, key, content, use_multipart=False)
        )

    def delete(self, key: str) -> None:
        """Deleting is idempotent, so it is repeated until it is answered."""
        import obstore

        validate_key(key)
        try:
            self._call("delete", key, unclear="unknown").repeat(lambda: obstore.delete(self._overwriter, key))
        except ObjectNotFound:  # S3 never says so, the others do
            self._reader.confirm_bucket(self._call("delete", key))

    def close(self) -> None:
        """End waits and threads; what runs elsewhere finishes or raises `StoreUnavailable`."""
        self._stop.set()
        self._reader.close()

    def _call(self, operation: str, key: str, *, unclear: str = "absent") -> Call:
        timeout_s = self._config.operation_timeout_s
        return Call(OBSTORE, self.url, operation, key, timeout_s=timeout_s, stop=self._stop, unclear=unclear)

    def _cut(self, pieces: Iterator[memoryview]) -> Iterator[bytes]:
        """Copies of at most a chunk each: the caller may reuse its buffers, uploads run behind."""
        size = self._config.chunk_bytes
        for piece in pieces:
            for begin in range(0, len(piece), size):
                yield bytes(piece[begin : begin + size])


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
