"""Why a writer must stop: another one committed its version, or a successor ended the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.errors import Fenced, FormatError, ObjectNotFound
from torch_delta.format.commit import Commit
from torch_delta.format.head import Successor
from torch_delta.format.keys import SUCCESSOR_KEY
from torch_delta.format.limits import MAX_HINT_BYTES
from torch_delta.stream.identity import read_json

if TYPE_CHECKING:
    from torch_delta.store.base import Store


def refuse_if_ended(store: Store, commit: Commit) -> None:
    """Stop a writer whose stream has a successor (rule N3).

    A successor that appears between this look and the create does no harm: readers that follow it ignore versions after
    the one it names.

    Raises:
        Fenced: there is one.
    """
    try:
        store.stat(SUCCESSOR_KEY)
    except ObjectNotFound:
        return
    try:
        successor = Successor.from_bytes(read_json(store, SUCCESSOR_KEY, MAX_HINT_BYTES))
        owner = f"stream {successor.successor_id} at {successor.root!r} beside it, forked from {successor.version}"
    except (FormatError, ObjectNotFound) as error:
        owner = f"unknown, it cannot be read: {error}"
    raise Fenced(
        f"{store.url} was ended by {SUCCESSOR_KEY}: version {commit.version} belongs to what goes on ({owner}). This "
        "writer must stop",
        version=commit.version,
        owner=owner,
        key=SUCCESSOR_KEY,
    )


def taken_by_another(store: Store, commit: Commit) -> Fenced:
    """The error of a writer that finds its version committed with other bytes (rule W5); names the winner."""
    try:
        winner = Commit.from_bytes(read_json(store, commit.key), key=commit.key)
        owner = f"stream {winner.stream_id}, {', '.join(f'{k}={v}' for k, v in sorted(winner.info.items()))}"
    except FormatError as error:
        owner = f"unknown, its commit cannot be read: {error}"
    return Fenced(
        f"{store.url}: version {commit.version} was committed by another writer ({owner}). This writer must stop; "
        "nothing of its version is visible. To go on, attach again: it proves by digest where the stream is",
        version=commit.version,
        owner=owner,
        key=commit.key,
    )
