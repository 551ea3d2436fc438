"""Where a stream begins and ends: probing for the newest version, listing what can be read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError, ObjectNotFound
from torch_delta.format.head import Head
from torch_delta.format.keys import (
    ANCHORS_PREFIX,
    COMMITS_PREFIX,
    HEAD_KEY,
    AnchorKey,
    commit_key,
    parse_anchor_key,
    parse_commit_key,
)
from torch_delta.format.limits import MAX_HINT_BYTES
from torch_delta.stream.identity import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch_delta.store.base import Store

logger = logging.getLogger("torch_delta")


def find_head(store: Store, stream_id: str, known: int | None) -> int:
    """The newest version; see `Stream.head`."""
    if known is not None and not _exists(store, known + 1):
        return known
    version = _start(store, stream_id, 0 if known is None else known + 1)
    while _exists(store, version + 1):
        version += 1
    return version


def list_versions(store: Store, after: int = 0) -> Iterator[int]:
    """Versions above `after` whose commits can be read, ascending."""
    for item in store.list(COMMITS_PREFIX, start_after=commit_key(after) if after > 0 else None):
        try:
            yield parse_commit_key(item.key)
        except FormatError:
            continue  # somebody else's file beside the commits


def last_run(versions: Iterable[int]) -> list[int]:
    """The end of an ascending series, from its last gap on."""
    run: list[int] = []
    for version in versions:
        if run and version != run[-1] + 1:
            run.clear()
        run.append(version)
    return run


def list_anchors(store: Store) -> tuple[AnchorKey, ...]:
    """Complete anchors by version: one without its manifest does not exist (rule A1)."""
    found = []
    for item in store.list(ANCHORS_PREFIX):
        if item.key.count("/") == 1:  # a manifest; files lie one folder deeper
            try:
                found.append(parse_anchor_key(item.key))
            except FormatError:
                continue  # somebody else's file beside the manifests
    return tuple(sorted(found, key=lambda anchor: (anchor.version, anchor.nonce)))


def _exists(store: Store, version: int) -> bool:
    try:
        store.stat(commit_key(version))
    except ObjectNotFound:
        return False
    return True


def _start(store: Store, stream_id: str, floor: int) -> int:
    """A version that exists, at least `floor` (which does): where probing starts."""
    hint = _hint(store, stream_id)
    if hint is not None and (hint <= floor or _exists(store, hint)):
        return max(hint, floor)
    version = max(list_versions(store, floor), default=floor)
    if version == 0:  # no commit at all: none yet, or retention removed them and an anchor stands for its version
        version = max((anchor.version for anchor in list_anchors(store)), default=0)
    return version


def _hint(store: Store, stream_id: str) -> int | None:
    """What head.json says, or None if it is absent, damaged or of another stream (rule H1)."""
    try:
        head = Head.from_bytes(read_json(store, HEAD_KEY, MAX_HINT_BYTES))
    except ObjectNotFound:
        return None
    except FormatError as error:
        logger.debug("%s: the hint is damaged and not used: %s", store.url, error)
        return None
    return head.version if head.stream_id == stream_id else None
