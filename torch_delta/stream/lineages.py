"""From a stream to the one that continues it: successors, followed inside the place a reader was told of (rule N2).

s3://bucket/runs/run-7           stream.json … successor.json ──► root "run-7-3fa94c21", successor_id
s3://bucket/runs/run-7-3fa94c21  stream.json, anchors/0…         its base is a version of the first, or an anchor
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from torch_delta.errors import ChainError, ObjectNotFound, TorchDeltaError
from torch_delta.format.keys import new_nonce, validate_key
from torch_delta.store.url import open_store
from torch_delta.stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.format.head import Successor
    from torch_delta.store.base import Store

_MOST_LINEAGES = 1000
_FORK_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_UNFIT = re.compile(r"[^a-z0-9._-]+")
_NAME_BYTES = 100
_FEWEST_SEGMENTS = {"file": 1, "memory": 1, "hf": 4}  # of a URL that lies in a folder; others: a bucket and a prefix


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


def sibling_url(url: str, root: str) -> str:
    """The URL of a store beside another one.

    Args:
        url: of the other one, as `Store.url` has it.
        root: keys joined by slashes, relative to the folder that the other one lies in.

    Raises:
        FormatError: `root` would lead out of that folder (rules K1 and N2).
        TorchDeltaError: the other one does not lie in a folder: it is a whole bucket.
    """
    validate_key(root)
    scheme, separator, path = url.partition("://")
    path = path.rstrip("/")
    parent, slash, _ = path.rpartition("/")
    if not separator or path.strip("/").count("/") + 1 < _FEWEST_SEGMENTS.get(scheme, 2) or path in {"", "/"}:
        raise TorchDeltaError(
            f"{url} lies in no folder, so that nothing can lie beside it; give streams a URL below a bucket, such as "
            f"{url.rstrip('/')}/run-1",
            url=url,
        )
    return f"{scheme}://{parent}{slash}{quote(root) if scheme == 'file' else root}"


def open_sibling(store: Store, root: str) -> Store:
    """An open store beside another one, with the credentials that the environment gives; the caller closes it.

    Raises:
        TorchDeltaError: as `sibling_url`, or the store cannot be opened.
    """
    return open_store(sibling_url(store.url, root))


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
    store = open_sibling(stream.store, successor.root)
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
