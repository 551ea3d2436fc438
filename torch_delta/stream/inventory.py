"""What lies in a store below the root of a stream, from a few listings: what retention decides by.

Everything is known by listing (F90: stores page through), ages are by the store's clock (rule L3), and nothing here is
ever deleted. Keys that are none of ours are left out: they are somebody else's files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError, ObjectNotFound
from torch_delta.format.keys import (
    ANCHORS_PREFIX,
    LEASES_PREFIX,
    PARTS_PREFIX,
    AnchorKey,
    anchor_key,
    parse_anchor_file_key,
    parse_anchor_key,
    parse_lease_key,
    parse_part_key,
)
from torch_delta.format.lease import Lease
from torch_delta.format.limits import MAX_HINT_BYTES
from torch_delta.stream.ends import list_versions
from torch_delta.stream.forks import list_notes
from torch_delta.stream.identity import read_json

if TYPE_CHECKING:
    from torch_delta.format.anchor import AnchorManifest
    from torch_delta.format.fork import ForkNote
    from torch_delta.store.base import ObjectInfo
    from torch_delta.stream.stream import Stream


@dataclass(slots=True)
class AnchorFiles:
    """One anchor, or what is left or not yet there of one.

    Attributes:
        manifest: its object, or None.
        files: by key.
    """

    manifest: ObjectInfo | None = None
    files: dict[str, ObjectInfo] = field(default_factory=dict)


@dataclass(slots=True)
class Inventory:
    """All objects that retention is about.

    Attributes:
        commits: versions that have one, ascending.
        parts: by version, ascending.
        anchors: by version and nonce, ascending.
        leases: that can be read and belong to the stream, with the object that holds each.
        dead_leases: objects that hold none.
        forks: notes of streams that were begun beside this one, with the object that holds each.
        dead_forks: objects that hold none.
    """

    commits: list[int]
    parts: dict[int, list[ObjectInfo]]
    anchors: dict[tuple[int, str], AnchorFiles]
    leases: list[tuple[Lease, ObjectInfo]]
    dead_leases: list[ObjectInfo]
    forks: list[tuple[ForkNote, ObjectInfo]]
    dead_forks: list[ObjectInfo]

    @property
    def newest_s(self) -> float | None:
        """Time of the newest object, by the store's clock: a lower bound of now."""
        times = [item.modified_s for item in self.objects() if item.modified_s is not None]
        return max(times, default=None)

    def objects(self) -> list[ObjectInfo]:
        """Every part, file, manifest, lease and note."""
        found = [item for parts in self.parts.values() for item in parts]
        for anchor in self.anchors.values():
            found += [*anchor.files.values(), *([anchor.manifest] if anchor.manifest is not None else [])]
        found += [item for _, item in self.leases] + [item for _, item in self.forks]
        return [*found, *self.dead_leases, *self.dead_forks]


def take_inventory(stream: Stream) -> Inventory:
    """List everything.

    Raises:
        StoreUnavailable: a listing could not be completed; nothing is concluded from a part of one (F78).
    """
    leases, dead = _leases(stream)
    forks, dead_forks = list_notes(stream)
    return Inventory(
        commits=[*list_versions(stream.store)],
        parts=_parts(stream),
        anchors=_anchors(stream),
        leases=leases,
        dead_leases=dead,
        forks=forks,
        dead_forks=dead_forks,
    )


def complete_manifest(stream: Stream, anchor: AnchorKey, found: AnchorFiles) -> AnchorManifest | None:
    """The manifest of an anchor whose files are all there with their sizes (rule L1); None if it is not that."""
    if found.manifest is None:
        return None
    try:
        manifest = stream.anchor(anchor)
    except (FormatError, ObjectNotFound):
        return None
    sizes = {key: item.size_bytes for key, item in found.files.items()}
    return manifest if all(sizes.get(file.key) == file.stored_bytes for file in manifest.files) else None


def _parts(stream: Stream) -> dict[int, list[ObjectInfo]]:
    found: dict[int, list[ObjectInfo]] = {}
    for item in stream.store.list(PARTS_PREFIX):
        try:
            found.setdefault(parse_part_key(item.key).version, []).append(item)
        except FormatError:
            continue
    return found


def _anchors(stream: Stream) -> dict[tuple[int, str], AnchorFiles]:
    found: dict[tuple[int, str], AnchorFiles] = {}
    for item in stream.store.list(ANCHORS_PREFIX):
        try:
            if item.key.count("/") == 1:
                named = parse_anchor_key(item.key)
                found.setdefault((named.version, named.nonce), AnchorFiles()).manifest = item
            else:
                named = parse_anchor_file_key(item.key)
                found.setdefault((named.version, named.nonce), AnchorFiles()).files[item.key] = item
        except FormatError:
            continue
    return dict(sorted(found.items()))


def _leases(stream: Stream) -> tuple[list[tuple[Lease, ObjectInfo]], list[ObjectInfo]]:
    stream_id = stream.load()[0].stream_id
    found, dead = [], []
    for item in stream.store.list(LEASES_PREFIX):
        try:
            parse_lease_key(item.key)
        except FormatError:
            continue
        try:
            lease = Lease.from_bytes(read_json(stream.store, item.key, MAX_HINT_BYTES), key=item.key)
        except ObjectNotFound:
            continue
        except FormatError:
            dead.append(item)
            continue
        if lease.stream_id == stream_id:
            found.append((lease, item))
        else:
            dead.append(item)
    return found, dead


def manifest_key(anchor: tuple[int, str]) -> str:
    """Key of the manifest of an anchor of the inventory."""
    return anchor_key(*anchor)
