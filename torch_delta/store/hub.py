"""A store in a bucket of the Hugging Face Hub.

Facts, listings and names go through `hub_http` (answers: `hub_replies`), bytes through `hub_xet`, and an object becomes
visible when a batch (`hub_batch`) names its content. The Hub has no conditional create; `hub_claims` says how small
objects are created exclusively all the same, and docs/stores.md what that is worth. Nothing is ever downloaded into a
file.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from torch_delta.errors import ObjectNotFound
from torch_delta.format.keys import validate_key
from torch_delta.store.base import BytesLike, Data, ObjectInfo, Store, views
from torch_delta.store.calls import Answer, Call
from torch_delta.store.hub_batch import Batcher
from torch_delta.store.hub_claims import CLAIMS, Claims
from torch_delta.store.hub_config import HubConfig, hub_endpoint, parse_hub_url
from torch_delta.store.hub_http import HubClient
from torch_delta.store.hub_replies import HUB, HubTrouble
from torch_delta.store.hub_xet import Content, Transfers, check_hf_xet
from torch_delta.store.keycheck import check_prefix, is_key, need_nonce, range_error, too_long
from torch_delta.store.sibling import sibling_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch_delta.store.hub_replies import HubFile

T = TypeVar("T")
_PIECE_BYTES = 1 << 20


class HubStore(Store):
    """Objects below a prefix of a Hub bucket.

    Opening sends no request and starts no thread. After its first use a store works in its own process only, not in
    one that is forked from it.

    Args:
        url: ``hf://buckets/owner/name/prefix``.
        config: limits; None for the defaults.

    Raises:
        TorchDeltaError: a malformed URL, a missing extra, or an endpoint that is refused.
    """

    def __init__(self, url: str, *, config: HubConfig | None = None) -> None:
        self._location = parse_hub_url(url)
        self._config = config if config is not None else HubConfig()
        check_hf_xet(self._location.url)
        self._stop = threading.Event()
        self._client = HubClient(self._location, hub_endpoint(self._location, self._config), self._config)
        self._transfers = Transfers(self._client, self._config, self._stop)
        self._batcher = Batcher(self._client, self._config.request_timeout_s)
        self._claims = Claims(self._client, self._batcher, self._config)

    @property
    def url(self) -> str:
        """``hf://buckets/owner/name/prefix``, without endpoint and token."""
        return self._location.url

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """One plain request up to `chunk_bytes`, the rest through hf-xet."""
        call = self._call("get", key)
        path, chunk_bytes = self._location.path(key), self._config.chunk_bytes
        size_bytes, first = self._read(call, lambda: self._client.read(path, 0, chunk_bytes, max_bytes=max_bytes))
        if first is None or (max_bytes is not None and size_bytes > max_bytes):
            raise too_long(self.url, key, size_bytes, max_bytes if max_bytes is not None else 0)
        if size_bytes <= len(first):
            return first
        return first + self._transfer(call.again(), len(first), size_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """One plain request up to `chunk_bytes`, hf-xet above."""
        if start < 0 or length < 0:
            raise ValueError(f"start and length must not be negative, got {start} and {length}")
        call = self._call("get_range", key)
        if length == 0 or length > self._config.chunk_bytes:
            size_bytes = self._look(call).size_bytes
            if start + length > size_bytes:
                raise range_error(self.url, key, start, length, size_bytes)
            return self._transfer(call.again(), start, start + length) if length else b""
        path = self._location.path(key)
        size_bytes, data = self._read(call, lambda: self._client.read(path, start, start + length))
        if data is None or len(data) != length:
            raise range_error(self.url, key, start, length, size_bytes)
        return data

    def stat(self, key: str) -> ObjectInfo:
        """One request."""
        return _info(key, self._look(self._call("stat", key)))

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """All pages are read before the first object is yielded, then sorted: an error never follows half an answer."""
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def _list(self, prefix: str, start_after: str | None) -> Iterator[ObjectInfo]:
        folder = self._location.path(prefix).rstrip("/")
        call = self._call("list", prefix, is_key=False)
        pages = call.repeat(lambda: [*self._client.pages(folder)])
        found = {}
        for file in chain.from_iterable(files for files, _ in pages):
            key = self._location.key(file.path)
            if key is not None and is_key(key) and key.startswith(prefix):
                found[key] = file
        for key in sorted(found):  # ASCII: as by their bytes
            if start_after is None or key > start_after:
                yield _info(key, found[key])

    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """Bytes and tuples up to `exclusive_bytes` are created exclusively, what is larger or streamed is not."""
        call = self._call("put_new", key, unclear="absent")
        is_repeatable = isinstance(data, bytes | bytearray | memoryview | tuple)
        is_exclusive = False
        if isinstance(data, bytes | bytearray | memoryview | tuple):
            is_exclusive = sum(len(view) for view in views(data)) <= self._config.exclusive_bytes
        if not is_exclusive:
            need_nonce(self.url, key, "put_new")
        if self._claims.look(call) is not None:
            raise call.exists()
        content = self._upload(call, data, is_repeatable=is_repeatable)
        call = call.again()  # the upload may have taken long
        if is_exclusive:
            return _info(key, self._claims.create(call, content))
        if self._claims.look(call) is not None:
            raise call.exists()
        return _info(key, self._claims.put(call, content))

    def copy(self, source: str, key: str) -> ObjectInfo:
        """A second name for content that is stored once; not exclusive, and read back like any put."""
        call = self._call("copy", key, unclear="absent")
        need_nonce(self.url, key, "copy")
        content = self._look(self._call("copy", source))
        if self._claims.look(call) is not None:
            raise call.exists()
        return _info(key, self._claims.put(call, Content(content.content, content.size_bytes)))

    def sibling(self, root: str) -> HubStore:
        """The same bucket, settings and endpoint; connections of its own."""
        return HubStore(sibling_url(self.url, root), config=self._config)

    def put_hint(self, key: str, data: BytesLike) -> None:
        """Names new content, repeated until it is answered."""
        call = self._call("put_hint", key, unclear="unknown")
        content = self._upload(call, data, is_repeatable=True)
        path = self._location.path(key)
        self._write(call, lambda: self._batcher.add(path, content))

    def delete(self, key: str) -> None:
        """Deleting is idempotent, so it is repeated until it is answered or the object is gone."""
        call = self._call("delete", key, unclear="unknown")
        path = self._location.path(key)

        def attempt() -> str | None:
            failure = self._batcher.delete(path)
            return failure if failure is not None and path in self._client.look([path]) else None

        self._write(call, attempt)

    def sweep_temporary(self, *, older_than_s: float) -> int:
        """Remove claims of dead writers; their age is measured by the Hub's clock."""
        call = self._call("sweep_temporary", "", unclear="unknown", is_key=False)
        folder = self._location.path(CLAIMS.rstrip("/"))
        num_removed = 0
        for files, now_s in call.repeat(lambda: [*self._client.pages(folder)]):
            for file in files:
                is_ours = file.path.startswith(f"{folder}/") and now_s is not None and file.uploaded_s is not None
                if is_ours and (now_s or 0.0) - (file.uploaded_s or 0.0) > older_than_s:
                    self._write(call, partial(self._remove, file.path))
                    num_removed += 1
        return num_removed

    def close(self) -> None:
        """End waits; what runs elsewhere finishes or raises `StoreUnavailable`."""
        self._stop.set()

    def _remove(self, path: str) -> None:
        self._batcher.delete(path)  # a failure means that its writer removed it first

    def _call(self, operation: str, key: str, *, unclear: str = "absent", is_key: bool = True) -> Call:
        if is_key:
            validate_key(key)
        timeout_s = self._config.operation_timeout_s
        call = Call(HUB, self.url, operation, key, timeout_s=timeout_s, stop=self._stop, unclear=unclear)
        try:
            self._transfers.check_process()
        except HubTrouble as trouble:
            raise call.unavailable(trouble.answer, outcome="absent") from trouble
        return call

    def _look(self, call: Call) -> HubFile:
        found = self._claims.look(call)
        if found is None:
            raise call.not_found()
        return found

    def _read(self, call: Call, attempt: Callable[[], T]) -> T:
        """Repeat a read; 'not found' is believed only of a bucket that exists."""
        try:
            return call.repeat(attempt)
        except ObjectNotFound:
            call.repeat(self._client.confirm)
            raise

    def _write(self, call: Call, attempt: Callable[[], str | None]) -> None:
        """Repeat an idempotent write until the Hub neither refuses it as a whole nor its entry (F76)."""
        while (failure := call.repeat(attempt)) is not None:
            call.wait(None, Answer("unclear", f"the Hub answered the batch, but: {failure}", "Repeat", None))

    def _upload(self, call: Call, data: Data, *, is_repeatable: bool) -> Content:
        if is_repeatable:
            return call.repeat(lambda: self._transfers.upload(_pieces(data)))
        call.start_attempt()
        try:
            return self._transfers.upload(_pieces(data))
        except HubTrouble as trouble:  # the pieces are gone; nothing has a name yet
            raise call.unavailable(trouble.answer, outcome="absent") from trouble

    def _transfer(self, call: Call, start: int, end: int) -> bytes:
        """A large range: through hf-xet, and if that fails by plain requests (F80)."""
        file = self._look(call)
        if end > file.size_bytes:
            raise range_error(self.url, call.key, start, end - start, file.size_bytes)
        try:
            return self._transfers.download(file, start, end)
        except HubTrouble as trouble:
            if trouble.answer.kind == "refused" and self._stop.is_set():
                raise call.unavailable(trouble.answer) from trouble
        begins = range(start, end, self._config.chunk_bytes)
        return b"".join(self._chunk(call.again(), begin, min(begin + begins.step, end)) for begin in begins)

    def _chunk(self, call: Call, begin: int, end: int) -> bytes:
        size_bytes, data = self._read(call, lambda: self._client.read(self._location.path(call.key), begin, end))
        if data is None or len(data) != end - begin:
            raise range_error(self.url, call.key, begin, end - begin, size_bytes)
        return data


def _pieces(data: Data) -> Iterable[bytes]:
    """Copies of at most a MiB each: the caller may reuse its buffers, the upload runs behind."""
    for view in views(data):
        for begin in range(0, len(view), _PIECE_BYTES):
            yield bytes(view[begin : begin + _PIECE_BYTES])


def _info(key: str, file: HubFile) -> ObjectInfo:
    return ObjectInfo(key, file.size_bytes, file.uploaded_s)
