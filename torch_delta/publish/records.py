"""What ranks tell each other about one version: receipts to the coordinator, outcomes back. Bytes and plain objects.

A receipt holds two sequences of boxes that reach tens of thousands in a model with many experts, so they are packed as
binary records behind a small JSON header. Both sides run the same release of this package: the layout is nobody's
format and may change at will.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch_delta.format.box import Box
from torch_delta.format.commit import PartRef
from torch_delta.format.digest import Digest
from torch_delta.publish.coordination import pack_error, unpack_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_delta.capture.source import OwnedBox
    from torch_delta.errors import TorchDeltaError

_LENGTH = struct.Struct("<Q")
_BOX_HEAD = struct.Struct("<IB")  # tensor, number of dims
_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRecord:
    """One slice of an uploaded part, as far as the coordinator must know it."""

    tensor: int
    """Index into `Schema.tensors`."""
    box: Box
    increment: Digest
    """What the slice adds to the digest of its tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What one rank did for one version."""

    error: TorchDeltaError | None = None
    """Why there are no parts; everything else is empty then."""
    parts: tuple[PartRef, ...] = ()
    slices: tuple[SliceRecord, ...] = ()
    """Of all parts, ascending within each part."""
    owned: tuple[tuple[int, Box], ...] | None = None
    """(tensor, box) this rank owns from this version on, when that differs from what it said last."""
    num_heard: int = 0
    """Outcomes the rank has read; once all ranks have, they are deleted."""

    def to_bytes(self) -> bytes:
        """Pack for the key-value store."""
        header = {
            "error": None if self.error is None else pack_error(self.error).decode(),
            "parts": [asdict(part) for part in self.parts],
            "num_slices": len(self.slices),
            "num_heard": self.num_heard,
            "num_owned": None if self.owned is None else len(self.owned),
        }
        text = json.dumps(header).encode()
        pieces = [_LENGTH.pack(len(text)), text]
        for record in self.slices:
            pieces += (_pack_box(record.tensor, record.box), record.increment.to_bytes())
        pieces.extend(_pack_box(tensor, box) for tensor, box in self.owned or ())
        return b"".join(pieces)

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Unpack what `to_bytes` packed."""
        (length,) = _LENGTH.unpack_from(data)
        position = _LENGTH.size + length
        header = json.loads(data[_LENGTH.size : position])
        slices = []
        for _ in range(header["num_slices"]):
            tensor, box, position = _unpack_box(data, position)
            slices.append(
                SliceRecord(
                    tensor=tensor, box=box, increment=Digest.from_bytes(data[position : position + _DIGEST_BYTES])
                )
            )
            position += _DIGEST_BYTES
        owned = None
        if header["num_owned"] is not None:
            owned, position = _unpack_boxes(data, position, header["num_owned"])
        return cls(
            error=None if header["error"] is None else unpack_error(header["error"].encode()),
            parts=tuple(PartRef(**part) for part in header["parts"]),
            slices=tuple(slices),
            owned=owned,
            num_heard=header["num_heard"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The version exists."""

    version: int
    num_changed: int
    stored_bytes: int
    num_parts: int
    receipts_s: float
    commit_s: float
    is_anchor_due: bool = False
    """Every rank takes part in an anchor of the version `max_in_flight` later; all of them have read this by then."""

    def to_bytes(self) -> bytes:
        """Pack for the key-value store."""
        return json.dumps({"committed": asdict(self)}).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Aborted:
    """A version, and every later one in flight, will not become part of the stream now."""

    error: TorchDeltaError
    """`PublishFailed` with `.failures`, or `Fenced`: then nothing of this publisher will ever be again."""
    at_step: int
    """Every rank raises `error` when its own count reaches this one."""
    next_version: int
    """Number of the next version to publish; what was collected for it and later ones is rolled back. Above
    `error.version` when only the outcome of that one is unknown: it stays pending and is settled first."""

    def to_bytes(self) -> bytes:
        """Pack for the key-value store."""
        return json.dumps(
            {
                "aborted": {
                    "error": pack_error(self.error).decode(),
                    "at_step": self.at_step,
                    "next_version": self.next_version,
                }
            }
        ).encode()


def read_outcome(data: bytes) -> Committed | Aborted:
    """Unpack an outcome."""
    said = json.loads(data)
    if "committed" in said:
        return Committed(**said["committed"])
    aborted = said["aborted"]
    return Aborted(
        error=unpack_error(aborted["error"].encode()),
        at_step=aborted["at_step"],
        next_version=aborted["next_version"],
    )


def pack_owned(owned: Iterable[OwnedBox]) -> bytes:
    """Boxes of one rank, for the agreement when attaching."""
    boxes = [_pack_box(item.tensor, item.box) for item in owned]
    return _LENGTH.pack(len(boxes)) + b"".join(boxes)


def unpack_owned(data: bytes | memoryview) -> tuple[tuple[tuple[int, Box], ...], int]:
    """(tensor, box) pairs, and how many bytes they took."""
    (count,) = _LENGTH.unpack_from(data)
    return _unpack_boxes(data, _LENGTH.size, count)


def pack_all_owned(payloads: Sequence[bytes]) -> bytes:
    """What every rank packed with `pack_owned`, as one value."""
    return b"".join(payloads)


def unpack_all_owned(data: bytes) -> list[tuple[tuple[int, Box], ...]]:
    """Boxes by rank, from `pack_all_owned`."""
    found = []
    view = memoryview(data)
    while view:
        owned, taken = unpack_owned(view)
        found.append(owned)
        view = view[taken:]
    return found


def _pack_box(tensor: int, box: Box) -> bytes:
    dims = len(box.shape)
    return _BOX_HEAD.pack(tensor, dims) + struct.pack(f"<{2 * dims}Q", *box.offset, *box.shape)


def _unpack_box(data: bytes | memoryview, position: int) -> tuple[int, Box, int]:
    tensor, dims = _BOX_HEAD.unpack_from(data, position)
    position += _BOX_HEAD.size
    numbers = struct.unpack_from(f"<{2 * dims}Q", data, position)
    return tensor, Box(offset=numbers[:dims], shape=numbers[dims:]), position + 16 * dims


def _unpack_boxes(data: bytes | memoryview, position: int, count: int) -> tuple[tuple[tuple[int, Box], ...], int]:
    found = []
    for _ in range(count):
        tensor, box, position = _unpack_box(data, position)
        found.append((tensor, box))
    return tuple(found), position
