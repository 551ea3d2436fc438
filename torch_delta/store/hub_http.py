"""Requests to a Hub bucket: facts of objects, listings, batches and plain reads; each ends in time.

huggingface_hub brings the session (proxies, certificates, the user's own client), the credentials and the headers. Its
methods for buckets are not called, because they wait without a limit and repeat writes by themselves, and earlier
releases overlooked the failed entries of a batch that was answered with 200 (F76).
"""

from __future__ import annotations

import importlib
import json
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from torch_delta.store.calls import Answer
from torch_delta.store.hub_replies import (
    REPEAT_ADVICE,
    REQUEST_ADVICE,
    HubFile,
    HubTrouble,
    Reply,
    files,
    meaning,
    next_page,
    parse,
    server_time_s,
    total_bytes,
    trouble,
    words,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_delta.store.hub_config import HubConfig, HubLocation

_MOST_REPLY_BYTES: Final = 64 << 20
_MOST_WORDS: Final = 300
_LIST_PAGE: Final = 1000


class HubClient:
    """One bucket. Thread-safe.

    Args:
        location: of the store.
        endpoint: the Hub's address.
        config: limits.
    """

    def __init__(self, location: HubLocation, endpoint: str, config: HubConfig) -> None:
        self.location = location
        self._config = config
        self._bucket_url = f"{endpoint}/api/buckets/{location.bucket}"
        self._file_url = f"{endpoint}/buckets/{location.bucket}/resolve"
        self._is_known = False  # whether any answer proved that the bucket exists

    def token_url(self, kind: str) -> str:
        """Where hf-xet gets its tokens, which it renews by itself; `kind` is ``"read"`` or ``"write"``."""
        return f"{self._bucket_url}/xet-{kind}-token"

    def headers(self) -> dict[str, str]:
        """Credentials as they are now: `HF_TOKEN`, else what `hf auth login` left."""
        return dict(_hub_utils().build_hf_headers(library_name="torch_delta"))

    def look(self, paths: Sequence[str]) -> dict[str, HubFile]:
        """Facts of those objects that exist, in one request; at most 1000."""
        reply = self._ask("POST", f"{self._bucket_url}/paths-info", content=json.dumps({"paths": [*paths]}))
        self._is_known = True
        return {file.path: file for file in files(parse(reply))}

    def pages(self, folder: str) -> Iterator[tuple[list[HubFile], float | None]]:
        """All objects below a folder, page by page, each with the Hub's time when it answered.

        Args:
            folder: in the bucket, without a slash at its end; empty for all.
        """
        url = f"{self._bucket_url}/tree" + (f"/{quote(folder, safe='')}" if folder else "")
        query = {"recursive": "true", "limit": str(_LIST_PAGE)}
        while True:
            try:
                reply = self._ask("GET", f"{url}?{urlencode(query)}")
            except HubTrouble as error:
                if error.answer.kind != "absent":
                    raise
                self.confirm()
                return  # the bucket exists and has no such folder
            self._is_known = True
            yield files(parse(reply)), server_time_s(reply)
            following = next_page(reply)
            if following is None:
                return
            if following == query:
                raise trouble("a page of the listing names itself as the next", REPEAT_ADVICE, reply.status)
            query = following

    def batch(self, operations: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Add and delete objects. Not a transaction.

        Returns:
            The operations that failed: path and reason (F76).
        """
        content = "".join(f"{json.dumps(operation)}\n" for operation in operations)
        headers = {"Content-Type": "application/x-ndjson"}
        url = f"{self._bucket_url}/batch"
        # Half of what a claim is good for: see `hub_claims`.
        most_s = self._config.claim_timeout_s / 2
        reply = self._ask("POST", url, content=content, headers=headers, accept=(200, 422), most_s=most_s)
        self._is_known = True
        failed = parse(reply)
        entries = failed.get("failed", []) if isinstance(failed, dict) else []
        found = {str(entry.get("path")): str(entry.get("error")) for entry in entries}
        if reply.status != 200 and not found:
            raise trouble(f"{reply.status}: {words(reply.body)}", REQUEST_ADVICE, reply.status, kind="refused")
        return found

    def read(self, path: str, start: int, end: int, *, max_bytes: int | None = None) -> tuple[int, bytes | None]:
        """Bytes start..end of an object by one plain request, fewer if it ends before.

        Args:
            path: in the bucket.
            start: first byte.
            end: one past the last byte, above `start`.
            max_bytes: of a longer object nothing is read.

        Returns:
            The object's size, and the bytes or None if it is longer than `max_bytes`.
        """
        url = f"{self._file_url}/{quote(path, safe='')}"
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        reply = self._ask("GET", url, headers=headers, accept=(200, 206, 416), max_total_bytes=max_bytes)
        size_bytes = total_bytes(reply)
        if reply.status == 416:
            return size_bytes if size_bytes is not None else self._size(path), b""
        if size_bytes is None:
            raise trouble("a reply does not say how long the object is", REPEAT_ADVICE, reply.status)
        if max_bytes is not None and size_bytes > max_bytes:
            return size_bytes, None
        body = reply.body if reply.status == 206 else reply.body[start:end]
        expected = max(0, min(end, size_bytes) - start)
        if len(body) != expected:
            raise trouble(f"the body has {len(body)} bytes, expected {expected}", REPEAT_ADVICE, reply.status)
        return size_bytes, body

    def confirm(self) -> None:
        """Raise if the bucket is missing: 'not found' is believed only of a bucket that exists (F78)."""
        if not self._is_known:
            self._ask("GET", self._bucket_url)
            self._is_known = True

    def _size(self, path: str) -> int:
        found = self.look([path])
        if path not in found:
            raise HubTrouble(Answer("absent", "there is no such object", "", None))
        return found[path].size_bytes

    def _ask(
        self,
        method: str,
        url: str,
        *,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (200,),
        max_total_bytes: int | None = None,
        most_s: float = float("inf"),
    ) -> Reply:
        """One request and its whole reply.

        Raises:
            HubTrouble: no reply, another status than `accept`, or not in time.
        """
        config = self._config
        most_s = min(most_s, config.request_timeout_s)
        deadline_s = time.monotonic() + most_s
        stall_s = min(config.stall_timeout_s, most_s)
        every = {**self.headers(), "Content-Type": "application/json", **(headers if headers is not None else {})}
        try:
            with (
                _hub_utils()
                .get_session()
                .stream(
                    method,
                    url,
                    headers=every,
                    content=content.encode() if content is not None else None,
                    timeout=(config.connect_timeout_s, stall_s, stall_s, stall_s),
                    follow_redirects=True,
                ) as response
            ):
                seen = Reply(response.status_code, response.headers, b"")
                is_too_long = max_total_bytes is not None and (total_bytes(seen) or 0) > max_total_bytes
                body = bytearray()
                for piece in () if is_too_long and response.status_code in accept else response.iter_bytes():
                    body += piece
                    if time.monotonic() > deadline_s or len(body) > _MOST_REPLY_BYTES:
                        raise trouble(f"a reply was cut after {len(body)} bytes: too slow or too long", REPEAT_ADVICE)
        except _transport_errors() as error:
            said = " ".join(str(error).split()) or type(error).__name__
            offline = type(error).__name__ == "OfflineModeIsEnabled"
            advice = "Unset HF_HUB_OFFLINE" if offline else REPEAT_ADVICE
            raise trouble(said[:_MOST_WORDS], advice, kind="refused" if offline else "unclear") from error
        reply = Reply(seen.status, seen.headers, bytes(body))
        if reply.status not in accept:
            raise HubTrouble(meaning(reply))
        return reply


def _hub_utils() -> Any:
    """huggingface_hub.utils: on first use, and without a type, because it does not export names in a typed way."""
    return importlib.import_module("huggingface_hub.utils")


def _transport_errors() -> tuple[type[Exception], ...]:
    """What sending and receiving may raise; the first belongs to the HTTP library of the huggingface_hub at hand."""
    base: Any = importlib.import_module("huggingface_hub.errors").HfHubHTTPError.__mro__[1]
    return (base, OSError, RuntimeError)
