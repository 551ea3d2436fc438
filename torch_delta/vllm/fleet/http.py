"""JSON over HTTP to one server, with a deadline for the whole exchange.

The standard library does: no proxy from the environment, no redirect (a token would travel along), a new connection for
each call (a few per version). Its own timeout counts from byte to byte; a server that sends one byte a second would
never run into it, so a watchdog closes the socket when time is up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlencode, urlsplit

from torch_delta.errors import DeadlineExceeded, ServerRefused, ServerUnavailable

MAX_ANSWER_BYTES = 16 << 20
"""An answer above this is refused; statuses of models with thousands of reloaded tensors stay far below."""

_HINTS = {
    401: "; pass the server's API key as token=",
    403: "; pass the server's API key as token=",
    404: "; start the server with VLLM_PLUGINS=torch_delta (our routes) or VLLM_SERVER_DEV_MODE=1 (vLLM's own)",
}


class Deadline:
    """A point in time that a step must end by. Thread-safe: it never changes.

    Args:
        timeout_s: from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def late(self, phase: str, peer: str, why: str) -> DeadlineExceeded:
        """The error for a step that did not end in time."""
        return DeadlineExceeded(
            f"{phase}: server {peer} did not finish within {self.timeout_s:g} s ({why}); if it is merely slow, raise "
            "this timeout, else look at the server's log",
            phase=phase,
            peer=peer,
            url=peer,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server said."""

    status: int
    """Of HTTP."""
    body: object
    """The JSON value; None if there was none (a 404 of some proxy, for example)."""
    text: str
    """The start of the body as text, for messages."""

    @property
    def ok(self) -> bool:
        """Whether the server reports success."""
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        """The server's explanation, in the places where vLLM and our plugin put one."""
        body = self.body
        if isinstance(body, dict):
            inner = body.get("error", body.get("detail", body.get("message")))
            if isinstance(inner, dict):
                inner = inner.get("message", inner)
            if inner is not None:
                return str(inner)
        return self.text or "no explanation"


class Http:
    """Calls one server. Thread-safe: every call has its own connection.

    Args:
        url: ``http://host:port`` or ``https://...``; a path in it is put before every route.
        token: for the Authorization header; None sends none.

    Raises:
        ValueError: the URL names no HTTP server, or carries credentials (they would end up in messages and logs).
    """

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"expected the URL of a server such as http://host:8000, got {url!r}")
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"the URL of server {parts.hostname} carries credentials; pass them as token=")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
            raise ValueError("the token must be visible ASCII without surrounding spaces (a line break from a file?)")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json", "Connection": "close"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(
        self,
        method: str,
        route: str,
        *,
        phase: str,
        deadline: Deadline,
        body: object | None = None,
        query: dict[str, str] | None = None,
    ) -> Answer:
        """One request and its answer, whatever its status.

        Args:
            method: ``"GET"`` or ``"POST"``.
            route: path below the server's URL, with a leading slash.
            phase: what the fleet is doing, for errors.
            deadline: of the whole exchange.
            body: sent as JSON if not None.
            query: the query string's fields.

        Raises:
            ServerUnavailable: no connection, or it broke.
            DeadlineExceeded: no whole answer in time.
            ServerRefused: an answer above `MAX_ANSWER_BYTES`.
        """
        target = f"{self._path}{route}" + (f"?{urlencode(query)}" if query else "")
        headers = dict(self._headers)
        data = None
        if body is not None:
            data = json.dumps(body, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        left_s = deadline.left_s()
        if left_s <= 0:
            raise deadline.late(phase, self.url, f"no time left for {method} {route}")
        connection = self._connection(left_s)
        try:
            connection.connect()
            watchdog = threading.Timer(deadline.left_s(), _cut, [cast("socket.socket", connection.sock)])
            watchdog.daemon = True
            watchdog.start()
            try:
                connection.request(method, target, body=data, headers=headers)
                with connection.getresponse() as response:
                    raw = response.read(MAX_ANSWER_BYTES + 1)
                    if len(raw) <= MAX_ANSWER_BYTES and (response.length or deadline.left_s() <= 0):
                        raise http.client.IncompleteRead(raw)  # a bounded read does not say so itself
            finally:
                watchdog.cancel()
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or deadline.left_s() <= 0:
                raise deadline.late(phase, self.url, f"waiting for {method} {route}") from error
            raise ServerUnavailable(
                f"{phase}: no answer from server {self.url} to {method} {route}: {type(error).__name__}: {error}; "
                "is it running, and is this its address?",
                url=self.url,
                phase=phase,
            ) from error
        finally:
            connection.close()
        return self._answer(response.status, raw, phase, route)

    def call(
        self,
        method: str,
        route: str,
        *,
        phase: str,
        deadline: Deadline,
        body: object | None = None,
        query: dict[str, str] | None = None,
    ) -> object:
        """Like `ask`, for a request that must succeed.

        Returns:
            The JSON value of the answer.

        Raises:
            ServerRefused: the answer is an error; its text is in the message.
        """
        answer = self.ask(method, route, phase=phase, deadline=deadline, body=body, query=query)
        if not answer.ok:
            raise self.refused(answer, phase, f"{method} {route}")
        return answer.body

    def refused(self, answer: Answer, phase: str, request: str) -> ServerRefused:
        """The error for an answer that is one."""
        return ServerRefused(
            f"{phase}: server {self.url} answered {request} with {answer.status}: {answer.message}"
            f"{_HINTS.get(answer.status, '')}",
            url=self.url,
            phase=phase,
            status=answer.status,
        )

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _answer(self, status: int, raw: bytes, phase: str, route: str) -> Answer:
        if len(raw) > MAX_ANSWER_BYTES:
            raise ServerRefused(
                f"{phase}: server {self.url} answered {route} with more than {MAX_ANSWER_BYTES} bytes; this is not an "
                "answer of vLLM's control routes",
                url=self.url,
                phase=phase,
                status=status,
            )
        text = raw[:500].decode("utf-8", "replace")
        try:
            body: object = json.loads(raw) if raw else None
        except ValueError:
            body = None
        return Answer(status=status, body=body, text=text)


def _cut(sock: socket.socket) -> None:
    """End a call whose time is up: its blocked read returns at once."""
    with contextlib.suppress(OSError):  # closed by the other side or by its own call in the meantime
        sock.shutdown(socket.SHUT_RDWR)
