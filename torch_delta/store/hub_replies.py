"""What the Hub answers: whole replies, what an error means, and the facts of objects in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from torch_delta.store.calls import Answer, Language

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_WORDS: Final = 300
# Request timeout, conflict with a request in flight, too early, too many requests.
_CLIENT_ERRORS_WORTH_REPEATING: Final = {408, 409, 425, 429}
_SERVER_ERRORS_FOR_GOOD: Final = {501, 505}
_LONGEST_ASKED_WAIT_S: Final = 60.0

REPEAT_ADVICE = "Check network and HF_ENDPOINT, then repeat"
_NO_BUCKET_ADVICE = (
    "There is no such bucket, or this token may not see it: create it with `hf buckets create`, or correct URL or token"
)
_ACCESS_ADVICE = (
    "Access is refused: set HF_TOKEN or log in with `hf auth login`, and check that the token may write to the bucket "
    "(to read it, for a follower)"
)
REQUEST_ADVICE = "The Hub refuses the request: check that HF_ENDPOINT is a Hub with buckets"


class HubTrouble(Exception):
    """A request did not succeed; `answer` says what that means. Stays inside the store."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.said)
        self.answer = answer


def _understand(error: Exception) -> Answer:
    if not isinstance(error, HubTrouble):
        raise TypeError(f"not an answer of the Hub: {error!r}")
    return error.answer


HUB: Final = Language(lambda: (HubTrouble,), _understand)


@dataclass(frozen=True, slots=True)
class HubFile:
    """What the Hub knows of an object.

    Attributes:
        path: in the bucket.
        size_bytes: its length.
        content: hash of its bytes as hf-xet computes it; equal bytes have equal hashes.
        uploaded_s: seconds since the epoch by the Hub's clock, or None.
    """

    path: str
    size_bytes: int
    content: str
    uploaded_s: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that arrived in full."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def trouble(said: str, advice: str, status: int | None = None, *, kind: str = "unclear") -> HubTrouble:
    """An error that a reply does not word by itself; `kind` is ``"unclear"`` or ``"refused"``."""
    return HubTrouble(Answer("refused" if kind == "refused" else "unclear", said, advice, status))


def meaning(reply: Reply) -> Answer:
    """What a reply other than success says."""
    status = reply.status
    code = reply.headers.get("X-Error-Code", "")
    message = reply.headers.get("X-Error-Message", "") or words(reply.body)
    said = f"{status} {code}: {message}"[:_MOST_WORDS].rstrip(": ")
    if code == "EntryNotFound":
        return Answer("absent", said, "", status)
    if status == 404:
        return Answer("no bucket", said, _NO_BUCKET_ADVICE, status)
    if status in {401, 403}:
        return Answer("refused", said, _ACCESS_ADVICE, status)
    if (300 <= status < 500 and status not in _CLIENT_ERRORS_WORTH_REPEATING) or status in _SERVER_ERRORS_FOR_GOOD:
        return Answer("refused", said, REQUEST_ADVICE, status)
    try:
        after_s = min(float(reply.headers.get("Retry-After", "0")), _LONGEST_ASKED_WAIT_S)
    except ValueError:  # a date: our own growing waits do
        after_s = 0.0
    return Answer("unclear", said, REPEAT_ADVICE, status, after_s=after_s)


def words(body: bytes) -> str:
    """The beginning of a body on one line."""
    return " ".join(body[:_MOST_WORDS].decode(errors="replace").split())


def parse(reply: Reply) -> Any:
    """The JSON of a reply.

    Raises:
        HubTrouble: it is none.
    """
    try:
        return json.loads(reply.body)
    except ValueError as error:
        said = f"a reply is no JSON: {words(reply.body)[:80]}"
        raise trouble(said, REPEAT_ADVICE, reply.status) from error


def files(entries: Any) -> list[HubFile]:
    """The objects among the entries of a reply.

    Raises:
        HubTrouble: an entry is not as it should be.
    """
    try:
        return [
            HubFile(entry["path"], int(entry["size"]), entry["xetHash"], _time_s(entry.get("uploadedAt")))
            for entry in entries
            if entry["type"] == "file"
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise trouble(f"an entry of a reply lacks what every object has: {error!r}", REQUEST_ADVICE) from error


def _time_s(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def server_time_s(reply: Reply) -> float | None:
    """The Hub's clock when it answered, seconds since the epoch."""
    try:
        return parsedate_to_datetime(reply.headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return None


def total_bytes(reply: Reply) -> int | None:
    """How long the whole object is of which a reply has a part."""
    total = reply.headers.get("Content-Range", "").rpartition("/")[2]
    if not total and reply.status == 200:
        total = reply.headers.get("Content-Length", "")
    return int(total) if total.isdecimal() else None


def next_page(reply: Reply) -> dict[str, str] | None:
    """The query of the next page. Only the query: the address stays ours, so the token goes nowhere else."""
    for link in reply.headers.get("Link", "").split(","):
        target, _, parameters = link.partition(";")
        if 'rel="next"' in parameters.replace(" ", ""):
            return dict(parse_qsl(urlsplit(target.strip().strip("<>")).query))
    return None
