"""A read-only S3 bucket over a folder: counts what is read, and holds reads back until a test lets them through."""

from __future__ import annotations

import email.utils
import hashlib
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from pathlib import Path


class FolderBucket:
    """See the module.

    Args:
        folder: each folder in it is a stream, at ``s3://bucket/<its name>``.

    Attributes:
        gets: how often each key was read in full or in part.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gets: Counter[str] = Counter()
        self.answering = True  # False: every request is answered 503
        self._held: str | None = None
        self._state = threading.Condition()
        self._num_held = 0
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                bucket._serve(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """For processes that read it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        }

    def hold(self, part_of_key: str) -> None:
        """From now on, reads of keys that contain this wait."""
        with self._state:
            self._held, self._num_held = part_of_key, 0

    def wait_until_held(self, timeout_s: float = 60.0) -> None:
        """Return when a read waits."""
        with self._state:
            assert self._state.wait_for(lambda: self._num_held > 0, timeout_s), "nobody read what is held back"

    def let_go(self) -> None:
        """Let all reads through."""
        with self._state:
            self._held = None
            self._state.notify_all()

    def num_gets(self, part_of_key: str) -> dict[str, int]:
        """Reads by key, of keys that contain this."""
        return {key: number for key, number in self.gets.items() if part_of_key in key}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        if not self.answering:
            self._reply(handler, 503, b"<Error><Code>SlowDown</Code></Error>")
        elif not key:
            self._list(handler, parse_qs(parts.query))
        else:
            self._object(handler, key)

    def _object(self, handler: BaseHTTPRequestHandler, key: str) -> None:
        if handler.command == "GET":
            with self._state:
                self.gets[key] += 1
                if self._held is not None and self._held in key:
                    self._num_held += 1
                    self._state.notify_all()
                    self._state.wait_for(lambda: self._held is None, 120)
        path = self.folder / key
        if not path.is_file():
            self._reply(handler, 404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Last-Modified": email.utils.formatdate(path.stat().st_mtime, usegmt=True),
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        if wanted is None:
            self._reply(handler, 200, data, headers)
            return
        begin, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        self._reply(handler, 206 if begin < len(data) else 416, data[begin : end + 1], headers)

    def _list(self, handler: BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        found = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        items = ""
        for key in sorted(key for key in found if key.startswith(prefix) and key > after and "/." not in key):
            status = found[key].stat()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            facts = f'<LastModified>{stamp}</LastModified><ETag>"x"</ETag><Size>{status.st_size}</Size>'
            items += f"<Contents><Key>{escape(key)}</Key>{facts}</Contents>"
        text = f"<ListBucketResult>{items}<IsTruncated>false</IsTruncated></ListBucketResult>"
        self._reply(handler, 200, text.encode(), {"Content-Type": "application/xml"})

    def _reply(
        self, handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        try:
            handler.send_response(status)
            for name, value in (headers or {}).items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(data)
        except OSError:
            pass  # the reader is gone
