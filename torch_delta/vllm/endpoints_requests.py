"""What a request to our routes may look like: a token, JSON of bounded size, known fields. Imports no vLLM.

Requests come from whoever reaches the port (F116, F117): nothing is unpickled, nothing is guessed, and vLLM's own API
keys do not cover paths outside its guarded prefixes, so the token is checked here.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

MAX_BODY_BYTES = 64 << 10
"""The largest body of a request; ours take a few hundred bytes."""


class Problem(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what happened and what to do.
        phase: what was being done.
        kind: name of the error's class, for programs.
    """

    def __init__(self, status: int, message: str, *, phase: str, kind: str = "RequestRefused") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.phase = phase
        self.kind = kind

    def body(self) -> dict[str, object]:
        """In the shape of vLLM's own errors."""
        return {"error": {"message": self.message, "type": self.kind, "code": self.status, "phase": self.phase}}


class Tokens:
    """Bearer tokens that may control this server; none means that everybody may, as with vLLM's own routes.

    Args:
        tokens: as configured; empty ones are ignored.
    """

    def __init__(self, tokens: Iterable[str | None]) -> None:
        self._hashes = [hashlib.sha256(token.encode()).digest() for token in tokens if token]

    @property
    def required(self) -> bool:
        """Whether a request needs one."""
        return bool(self._hashes)

    def check(self, authorization: str | None) -> None:
        """Hold a request's Authorization header against the tokens, in time that does not depend on them.

        Raises:
            Problem: 401.
        """
        if not self._hashes:
            return
        scheme, _, given = (authorization or "").partition(" ")
        sent = hashlib.sha256(given.encode()).digest()
        matches = [secrets.compare_digest(sent, known) for known in self._hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise Problem(
                401, "this server needs its API key: Authorization: Bearer ...", phase="authorize", kind="Unauthorized"
            )


async def read_json(chunks: AsyncIterator[bytes], content_type: str | None) -> Mapping[str, object]:
    """The JSON object in a request's body; an empty body is an empty object.

    Args:
        chunks: of the body.
        content_type: the header.

    Raises:
        Problem: 413, 415 or 400.
    """
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Problem(413, f"the body is larger than {MAX_BODY_BYTES} bytes", phase="read")
    if not body:
        return {}
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise Problem(415, f"expected Content-Type: application/json, got {content_type!r}", phase="read")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", phase="read") from error
    if not isinstance(value, Mapping):
        raise Problem(400, f"expected a JSON object, got {type(value).__name__}", phase="read")
    return value


def fields(
    given: Mapping[str, object], known: Mapping[str, tuple[object, Callable[[object], bool], str]]
) -> dict[str, object]:
    """Values of a request's fields, defaults filled in.

    Args:
        given: what was sent.
        known: default, test and description of each field; a default of `REQUIRED` makes it required.

    Raises:
        Problem: 400, for an unknown field (the known ones are listed), a missing one or an impossible value.
    """
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise Problem(400, f"unknown field {unknown[0]!r}; known: {', '.join(known) or 'none'}", phase="read")
    values = {}
    for name, (default, fits, expected) in known.items():
        value = given.get(name, default)
        if value is REQUIRED:
            raise Problem(400, f"{name} is missing; expected {expected}", phase="read")
        if name in given and not fits(value):
            raise Problem(400, f"{name} is {value!r}; expected {expected}", phase="read")
        values[name] = value
    return values


REQUIRED = object()
"""As a default: there is none."""


def is_version(value: object) -> bool:
    """A version number of a stream."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_seconds(value: object) -> bool:
    """A time to wait."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
