"""From a stream to the one that continues it: successors, followed inside the place a reader was told of (rule N2).

s3://bucket/runs/run-7           stream.json … successor.json ──► root "run-7-3fa94c21", successor_id
s3://bucket/runs/run-7-3fa94c21  stream.json, anchors/0…         its base is a version of the first, or an anchor
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from torch_delta.errors import ChainError, ObjectNotFound
from torch_delta.format.keys import new_nonce
from torch_delta.stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.format.head import Successor

_MOST_LINEAGES = 1000
_FORK_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_UNFIT = re.compile(r"[^a-z0-9._-]+")
_NAME_BYTES = 100


class Lineage(NamedTuple):
    """One stream of a line of successors.

    Attributes:
        stream: it.
        via: the successor object that led there, or None for the first.
        root: relative to the folder of the one before, or None for the first.
    """

    stream: Stream
    via: Successor | None

    @property
    def root(self) -> str | None:
        """Where it lies beside the one before."""
        return None if self.via is None else self.via.root


def fork_root(url: str) -> str:
    """A new name beside the store at `url`, telling where it comes from."""
    name = unquote(url.rstrip("/").rpartition("/")[2]).lower()
    name = _UNFIT.sub("-", _FORK_SUFFIX.sub("", name)).strip("-.")[:_NAME_BYTES] or "stream"
    return f"{name}-{new_nonce()[:8]}"


def open_successor(stream: Stream, successor: Successor) -> Stream:
    """The stream that a successor names; the caller closes its store.

    Raises:
        ChainError: nothing lies there, or another stream does.
        StoreUnavailable: no clear answer.
    """
    store = stream.store.sibling(successor.root)
    found = Stream(store)
    try:
        _check_id(stream, successor, found.load()[0].stream_id)
    except ObjectNotFound as error:
        store.close()
        raise ChainError(
            f"{stream.store.url} ended at version {successor.version} and goes on at {successor.root!r} beside it, but "
            f"no stream lies there; it was deleted",
            successor=successor.root,
            target=successor.version,
        ) from error
    except BaseException:
        store.close()
        raise
    return found


def _check_id(stream: Stream, successor: Successor, got: str) -> None:
    if got != successor.successor_id:
        raise ChainError(
            f"{stream.store.url} goes on as stream {successor.successor_id} at {successor.root!r} beside it, but "
            f"stream {got} lies there",
            successor=successor.root,
            expected=successor.successor_id,
            got=got,
        )


def walk(stream: Stream) -> Iterator[Lineage]:
    """The stream and all that continue it, in order. The caller closes the stores of all but the first.

    Raises:
        ObjectNotFound: there is no stream to begin with.
        ChainError: the line leads nowhere, or in a circle.
    """
    stream.load()
    yield Lineage(stream, None)
    for _ in range(_MOST_LINEAGES):
        successor = stream.successor()
        if successor is None:
            return
        stream = open_successor(stream, successor)
        yield Lineage(stream, successor)
    raise ChainError(f"{stream.store.url}: more than {_MOST_LINEAGES} streams follow each other, or a circle of them")


def continues_from(stream: Stream, before: str, version: int) -> bool:
    """Whether version 0 of a stream is that version of the stream with id `before` (rule I3)."""
    base = stream.load()[0].base
    return (base.kind, base.name, base.revision) == ("stream", before, str(version))
