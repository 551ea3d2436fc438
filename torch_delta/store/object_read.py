"""Reading from a bucket: facts of an object, and ranges in parallel with bounded threads and memory."""

from __future__ import annotations

import io
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from torch_delta.errors import ObjectNotFound
from torch_delta.store.base import ObjectInfo
from torch_delta.store.keycheck import range_error, too_long
from torch_delta.store.object_answers import obstore_errors, understand

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore import Bytes, GetResult

    from torch_delta.store.calls import Call
    from torch_delta.store.object_config import Client, ObjectConfig

T = TypeVar("T")
Look = tuple[ObjectInfo, str | None]

NONCE: Final = "tdput"  # letters only: Azure wants an identifier, some proxies drop underscores


class Reader:
    """All that reads objects. Thread-safe.

    Args:
        client: detects stalls and does not repeat by itself.
        config: limits.
        stop: set when the store closes.
    """

    def __init__(self, client: Client, config: ObjectConfig, stop: threading.Event) -> None:
        self._client = client
        self._config = config
        self._stop = stop
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._has_bucket = False  # whether any answer proved that the bucket exists

    def saw_bucket(self) -> None:
        """Note that an answer proved the bucket to exist."""
        self._has_bucket = True

    def look(self, call: Call) -> Look:
        """Facts of an object, and the nonce of the put that made it or None if it carries none."""
        import obstore

        def attempt() -> Look:
            result = obstore.get(self._client, call.key, options={"head": True})
            nonces = [value for name, value in result.attributes.items() if name.lower() == NONCE]
            meta = result.meta
            info = ObjectInfo(call.key, meta["size"], meta["last_modified"].timestamp())
            return info, nonces[0] if nonces else None

        return self._read(call, attempt)

    def first(self, call: Call, max_bytes: int | None) -> tuple[int, Bytes]:
        """Size of an object and its first chunk, in one request.

        Raises:
            FormatError: it is longer than `max_bytes`; its body was not read.
        """
        from obstore import Bytes

        chunk_bytes = self._config.chunk_bytes

        def attempt() -> tuple[int, Bytes]:
            try:
                result = self._open(call.key, 0, chunk_bytes)
            except obstore_errors() as error:
                if understand(error).kind != "past the end":
                    raise
                return 0, Bytes()  # only an empty object has no first byte
            size_bytes = result.meta["size"]
            if max_bytes is not None and size_bytes > max_bytes:
                raise too_long(call.url, call.key, size_bytes, max_bytes)
            return size_bytes, _body(result, min(size_bytes, chunk_bytes))

        return self._read(call, attempt)

    def span(self, call: Call, start: int, end: int, head: Bytes | None = None) -> bytes:
        """`head`, if there is one, and after it bytes start..end of the object.

        They are fetched in chunks in parallel, each with the call's time for itself, and each is put into its place
        when it has come: there is no second copy of the whole, and copying goes on while others are on their way.

        Raises:
            FormatError: the object ends before.
        """
        chunk_bytes = self._config.chunk_bytes
        begins = range(start, end, chunk_bytes)

        def fetch(begin: int) -> Bytes:
            data = self._chunk(call.again(), begin, min(begin + chunk_bytes, end))
            if isinstance(data, int):
                raise range_error(call.url, call.key, start, end - start, data)
            return data

        if head is None and len(begins) == 1:
            return fetch(start).to_bytes()
        head_bytes = 0 if head is None else len(head)
        # Zeros cost nothing until they are written to, and CPython's `getvalue` hands out this very buffer.
        whole = io.BytesIO(bytes(head_bytes + end - start))
        with whole.getbuffer() as target:

            def place(begin: int) -> None:
                data = fetch(begin)
                at = head_bytes + begin - start
                target[at : at + len(data)] = memoryview(data)

            if head is not None:
                target[:head_bytes] = memoryview(head)
            self._in_parallel(call, place, begins)
        return whole.getvalue()

    def _in_parallel(self, call: Call, place: Callable[[int], None], begins: range) -> None:
        with self._lock:
            if self._stop.is_set():
                raise call.closed()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._config.num_parallel_reads, thread_name_prefix="torch_delta-get")
            futures = [self._pool.submit(place, begin) for begin in begins]
        try:
            for future in futures:
                future.result()
        except CancelledError as error:
            raise call.closed() from error
        finally:
            for future in futures:
                future.cancel()

    def confirm_bucket(self, call: Call) -> None:
        """Raise `StoreUnavailable` if the bucket is missing: HEAD says only 'not found' for that, too (F78)."""
        if self._has_bucket:
            return
        import obstore

        def first_page() -> None:
            try:
                next(iter(obstore.list(self._client, None, chunk_size=1)), None)
            except obstore_errors() as error:
                if understand(error).status not in {401, 403}:
                    raise
                # Not allowed to list, but it was allowed to say that the object is absent: the bucket exists.

        call.repeat(first_page)
        self._has_bucket = True

    def close(self) -> None:
        """Let the threads end."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _open(self, key: str, start: int, end: int) -> GetResult:
        import obstore

        return obstore.get(self._client, key, options={"range": (start, end)})

    def _read(self, call: Call, attempt: Callable[[], T]) -> T:
        """Repeat a read; believe 'not found' only of a bucket that exists."""
        try:
            answer = call.repeat(attempt)
        except ObjectNotFound:
            self.confirm_bucket(call)
            raise
        self._has_bucket = True
        return answer

    def _chunk(self, call: Call, begin: int, end: int) -> Bytes | int:
        """Bytes begin..end, or the object's size if it ends before."""

        def attempt() -> Bytes | int | None:
            try:
                result = self._open(call.key, begin, end)
            except obstore_errors() as error:
                if understand(error).kind != "past the end":
                    raise
                return None
            size_bytes = result.meta["size"]
            return size_bytes if size_bytes < end else _body(result, end - begin)

        data = self._read(call, attempt)
        return data if data is not None else self.look(call)[0].size_bytes


def _body(result: GetResult, expected_bytes: int) -> Bytes:
    data = result.bytes()
    if len(data) != expected_bytes:
        raise ConnectionError(f"the body has {len(data)} bytes, expected {expected_bytes}")
    return data
