"""Streams that a writer begins beside this one, and what is left of those whose writer died (rules N6 and L6).

    forks/<nonce>.json ──► anchor 0 and stream.json beside it ──► look ──► successor.json ──► the note goes
                      └── killed here: nobody follows what lies there, but the note tells retention where it is

A fork that was finished, is being made or was taken into use by somebody is never touched: what counts is the
`successor.json` of this stream, the age of everything that lies over there, and that it is no more than a beginning.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Protocol

from torch_delta.crashpoints import reach
from torch_delta.errors import FormatError, ObjectNotFound, StoreError
from torch_delta.format.fork import ForkNote
from torch_delta.format.keys import (
    FORKS_PREFIX,
    STREAM_KEY,
    anchor_key,
    new_nonce,
    parse_anchor_file_key,
    parse_anchor_key,
    parse_fork_key,
    schema_key,
)
from torch_delta.format.limits import MAX_HINT_BYTES
from torch_delta.format.streaminfo import StreamInfo
from torch_delta.stream.identity import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.store.base import ObjectInfo, Store
    from torch_delta.stream.stream import Stream


class Delete(Protocol):
    """Deletes an object of the stream, or of a store beside it; False if it could not be done."""

    def __call__(self, key: str, size_bytes: int, beside: Store | None = None) -> bool:
        """Delete one object."""
        ...


def note_fork(stream: Stream, root: str, successor_id: str) -> ForkNote:
    """Say where a successor of `stream` will lie, before anything does (rule N6).

    Raises:
        StoreUnavailable: no clear answer; nothing may be written there.
    """
    info = {"host": platform.node()[:255], "pid": str(os.getpid())}
    stream_id = stream.load()[0].stream_id
    note = ForkNote(nonce=new_nonce(), stream_id=stream_id, root=root, successor_id=successor_id, info=info)
    stream.store.create_or_same(note.key, note.to_bytes())
    return note


def refuse_if_swept(store: Store, anchor_nonce: str) -> None:
    """Stop a writer that was away for so long that retention took its fork for dead (rule N6).

    Args:
        store: of the new stream, which was just created.
        anchor_nonce: of the anchor of its version 0.

    Raises:
        StoreError: something of it is gone; the fork must be made again, under another root.
    """
    for key in (anchor_key(0, anchor_nonce), STREAM_KEY):  # a deletion takes one of these two before all else
        try:
            store.stat(key)
        except ObjectNotFound as error:
            raise StoreError(
                f"{store.url}: {key} of the stream that was being forked is gone: this writer took longer than the "
                "grace period of retention, which removed it. Attach again",
                key=key,
                url=store.url,
                operation="fork",
            ) from error


def list_notes(stream: Stream) -> tuple[list[tuple[ForkNote, ObjectInfo]], list[ObjectInfo]]:
    """Notes of this stream with the objects that hold them, and objects that hold none.

    Raises:
        StoreUnavailable: the listing could not be completed.
    """
    stream_id = stream.load()[0].stream_id
    found, dead = [], []
    for item in stream.store.list(FORKS_PREFIX):
        try:
            parse_fork_key(item.key)
        except FormatError:
            continue  # somebody else's file
        try:
            note = ForkNote.from_bytes(read_json(stream.store, item.key, MAX_HINT_BYTES), key=item.key)
        except ObjectNotFound:
            continue
        except FormatError:
            dead.append(item)
            continue
        if note.stream_id == stream_id:
            found.append((note, item))
        else:
            dead.append(item)
    return found, dead


def drop_fork(
    stream: Stream,
    note: ForkNote,
    item: ObjectInfo,
    *,
    is_old: Callable[[ObjectInfo], bool],
    delete: Delete,
    sweep: Callable[[Store], object],
) -> bool:
    """Delete what a dead writer left at the root of a note, or a note that is done with (rule L6).

    Args:
        stream: that the note is of.
        note: where the writer began.
        item: the object that holds the note.
        is_old: whether an object is beyond the grace period, by the store's clock.
        delete: what to delete with.
        sweep: removes old temporary files of a store.

    Returns:
        Whether a fork that was never finished went, in full.

    Raises:
        TorchDeltaError: no clear answer, or a root that cannot be one; nothing was deleted.
    """
    if not is_old(item):
        successor = stream.successor()
        if successor is not None and successor.root == note.root:
            delete(item.key, item.size_bytes)  # its writer was killed after the last step
        return False
    schema = schema_key(stream.load()[0].schema_id)
    with stream.store.sibling(note.root) as store:
        found = [*store.list()]
        ranks = {left.key: _rank(left.key, schema) for left in found}
        is_beginning = None not in ranks.values() and _is_of(store, note)
        if is_beginning and not all(map(is_old, found)):
            return False  # a slow writer, or one that was killed later than the note tells
        # As late as can be: it makes what lies there a stream that is followed.
        successor = stream.successor()
        if not is_beginning or (successor is not None and successor.root == note.root):
            delete(item.key, item.size_bytes)  # the fork was finished, or somebody took the place into use
            return False
        for left in sorted(found, key=lambda left: (ranks[left.key] or 0, left.key)):
            if not delete(left.key, left.size_bytes, store):
                return False  # the note stays, and with it the knowledge of the rest
            reach("gc.fork_object_deleted")
        sweep(store)
    return delete(item.key, item.size_bytes)


def _rank(key: str, schema: str) -> int | None:
    """When an object of an unfinished fork is deleted; None if it cannot be one's."""
    if key in {STREAM_KEY, schema}:
        return 0 if key == STREAM_KEY else 3
    try:
        is_manifest = key.count("/") == 1
        version = (parse_anchor_key(key) if is_manifest else parse_anchor_file_key(key)).version
    except FormatError:
        return None
    if version != 0:
        return None
    return 1 if is_manifest else 2


def _is_of(store: Store, note: ForkNote) -> bool:
    """Whether the stream there, if there is one yet, is the one of the note."""
    try:
        return StreamInfo.from_bytes(read_json(store, STREAM_KEY)).stream_id == note.successor_id
    except ObjectNotFound:
        return True
    except FormatError:
        return False
