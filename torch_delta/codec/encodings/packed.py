"""`packed`: positions as ranks within classes of the old exponent, values as steps. Relative, and the smallest.

    blob := base check (16 bytes)  directory  streams          see torch_delta.codec.packed for each step
    pack    changes ──▶ reduced (gaps and steps by class) ──▶ streams of all slices, pooled ──▶ zstd
    unpack  streams ──▶ gaps and steps ──walk over own old bits──▶ index, old, new ──▶ base check

Profile *small* comes from changes that were reduced while the bits of the whole box were at hand (`Change.reduced`);
others are written in profile *fast*, whose positions are gaps without classes. One decoder reads both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from torch_delta.codec.bits import bits_dtype
from torch_delta.codec.change import Change
from torch_delta.codec.digest import digest_many
from torch_delta.codec.encodings.base import Packed as PackedFrame
from torch_delta.codec.geometry import Layout
from torch_delta.codec.packed.classes import exponent_of
from torch_delta.codec.packed.emit import emit
from torch_delta.codec.packed.gather import Expected, gather
from torch_delta.codec.packed.locate import locate
from torch_delta.codec.packed.pieces import local_index
from torch_delta.codec.packed.reduced import Flat, Reduced
from torch_delta.codec.packed.streams import NAMES, SealedStreams, seal
from torch_delta.errors import DigestMismatch
from torch_delta.format.checks import broken
from torch_delta.format.digest import DIGEST_BYTES, ZERO, Digest
from torch_delta.format.limits import MAX_FRAME_RAW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_delta.codec.encodings.base import OldRegion
    from torch_delta.codec.packed.gather import Run
    from torch_delta.format.frames import Frame
    from torch_delta.format.schema import Schema


class Packed:
    """Compressed layout; frames hold at most `MAX_FRAME_RAW_BYTES` of boxes, so large changes are cut beforehand."""

    name = "packed"
    is_absolute = False

    def fewest_bytes(self, schema: Schema, change: Change) -> int | None:  # noqa: ARG002  part of the interface
        """A bit of sign per element; None without old bits, or for a box that has to be cut."""
        if change.old is None or change.box.numel * change.new.itemsize > MAX_FRAME_RAW_BYTES:
            return None
        return change.count // 8

    def estimated_bytes(self, change: Change, *, level: int) -> int | None:  # noqa: ARG002  part of the interface
        """Never needed: tried before others."""
        return None

    def pack(self, schema: Schema, changes: Sequence[Change], *, level: int) -> PackedFrame:
        """Memory is O(changed)."""
        emitted = emit([_listed(schema, change) for change in changes])
        check = _base_check(schema, changes)
        pieces, stored = seal(check.to_bytes(), emitted.streams, level=level)
        blob = b"".join(pieces)
        shares = np.array([stored[name] for name in NAMES]) / np.maximum(emitted.usage.sum(axis=0), 1)
        return PackedFrame(
            payload={self.name: blob},
            stored_bytes=len(blob),
            raw_bytes=sum(change.box.numel * change.new.itemsize for change in changes),
            measured=tuple(np.ceil(emitted.usage @ shares).astype(int).tolist()),
        )

    def unpack(
        self, schema: Schema, frame: Frame, payload: Mapping[str, memoryview], old: OldRegion, *, key: str
    ) -> Iterator[Change]:
        """Arrays are views of those of the whole frame."""
        blob = payload[self.name]
        if len(blob) <= DIGEST_BYTES:
            raise broken("E7", key, f"a packed frame begins with {DIGEST_BYTES} bytes of base check, got {len(blob)}")
        slices = [
            Expected(item.count, item.box.numel, bits_dtype(schema.tensors[item.tensor].dtype)) for item in frame.slices
        ]
        runs = gather(SealedStreams(blob[DIGEST_BYTES:], key=key), slices, key=key)
        changes = [change for run in runs for change in _changes(schema, run, frame, old, key)]
        check = _base_check(schema, changes)
        expected = Digest.from_bytes(bytes(blob[:DIGEST_BYTES]))
        if check != expected:
            names = [schema.tensors[item.tensor].name for item in frame.slices]
            raise DigestMismatch(
                f"{key}: the old bits of {names[0]!r}{f' or {len(names) - 1} more tensors' if names[1:] else ''} here "
                f"are not the ones the delta was made from (base check {check}, expected {expected}); nothing was "
                "written. Start again from an anchor or a fresh copy of the base (rule E6)",
                tensor=names[0],
                tensors=names,
                key=key,
                expected=expected.hex(),
                got=check.hex(),
            )
        yield from changes


def _changes(schema: Schema, run: Run, frame: Frame, old: OldRegion, key: str) -> Iterator[Change]:
    """The changes of a run of slices, with their digests."""
    items = frame.slices[run.first : run.first + run.num_slices]
    specs = [schema.tensors[item.tensor] for item in items]
    located = locate(run, specs, [np.ascontiguousarray(old(item)).reshape(-1) for item in items], key=key)
    layouts = [Layout.of(item.box, spec.shape) for item, spec in zip(items, specs, strict=True)]
    digests = digest_many(layouts, run.starts, *located)
    for item, of_item, (begin, end) in zip(items, digests, pairwise(run.starts.tolist()), strict=True):
        index, before, new = located.part(begin, end)
        yield Change(
            tensor=item.tensor,
            box=item.box,
            index=index,
            old=before,
            new=new,
            increment=item.increment,
            digests=of_item,
        )


def _base_check(schema: Schema, changes: Sequence[Change]) -> Digest:
    """Digest of the old bits of all changed elements (rule E6)."""
    total = ZERO
    for change in changes:
        total += change.computed_digests(schema)[0]
    return total


def _listed(schema: Schema, change: Change) -> Reduced | Flat:
    """What the change carries, or what its gaps are made of."""
    if change.reduced is not None:
        [reduced] = change.reduced
        return reduced
    assert change.old is not None
    return Flat(
        positions=local_index(change.positions(), 0),
        old=change.old,
        new=change.new,
        numel=change.box.numel,
        sign_magnitude=exponent_of(schema.tensors[change.tensor].dtype).sign_magnitude,
    )
