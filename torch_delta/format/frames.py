"""Slices and frames: what a part says about the boxes of its tensors, and the rules each must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import UnsupportedFormat
from torch_delta.format.box import check_disjoint
from torch_delta.format.checks import broken
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.encodings import ENCODINGS, Encoding
from torch_delta.format.limits import MAX_FRAME_RAW_BYTES, SUPPORTED_FEATURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema


@dataclass(frozen=True, slots=True)
class Slice:
    """What one sender says about one box of one tensor.

    Attributes:
        tensor: schema index.
        box: in full-tensor coordinates.
        count: elements the slice sets; all of the box for `dense`.
        increment: digest of the new bits of the box minus digest of the old ones.
    """

    tensor: int
    box: Box
    count: int
    increment: Digest


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Slices that share one encoding and one piece of payload. Frames compare by identity.

    Attributes:
        encoding: a name in `ENCODINGS`.
        slices: at least one, strictly ascending by `(tensor, box.offset)`.
        stored_bytes: of the payload as stored; 0 for encodings whose sizes follow from the slices.
        raw_bytes: of the payload once decompressed, where a decoder must stop; 0 for the same encodings.
    """

    encoding: str
    slices: tuple[Slice, ...]
    stored_bytes: int = 0
    raw_bytes: int = 0


def check_frame(frame: Frame, *, schema: Schema, key: str) -> Encoding:
    """Check a frame against the schema: everything about it except its payload.

    Raises:
        FormatError: one of rules P7 to P10 is broken.
        UnsupportedFormat: an encoding of a later release.
    """
    encoding = ENCODINGS.get(frame.encoding)
    if encoding is None:
        raise broken("P12", key, f"unknown encoding {frame.encoding!r}; known: {', '.join(ENCODINGS)}")
    need_supported(encoding, key)
    if not frame.slices:
        raise broken("P6", key, "a frame has at least one slice")
    tensors = schema.tensors
    raw_bytes = 0
    last_tensor = -1
    last_offset: tuple[int, ...] = ()
    for item in frame.slices:
        index, box = item.tensor, item.box
        if not 0 <= index < len(tensors):
            raise broken("P7", key, f"slice of tensor {index}, the schema has {len(tensors)}", tensor=index)
        spec = tensors[index]
        if spec.alias_of is not None:
            raise broken("P7", key, f"slice of {spec.name!r}, an alias of {spec.alias_of!r}", tensor=spec.name)
        if index < last_tensor or (index == last_tensor and box.offset <= last_offset):
            raise broken(
                "P7", key, f"slices of a frame ascend by tensor and offset; {spec.name!r} {box.offset} does not"
            )
        last_tensor, last_offset = index, box.offset
        numel = box.numel
        if numel < 1 or not box.fits(spec.shape):
            raise broken(
                "P8",
                key,
                f"box at {box.offset} of shape {box.shape} is empty or outside {spec.name!r} of shape {spec.shape}",
                tensor=spec.name,
                expected=spec.shape,
                got=box,
            )
        if not 1 <= item.count <= numel or (not encoding.counted and item.count != numel):
            raise broken(
                "P9", key, f"count {item.count} in a box of {numel} elements of {spec.name!r}", tensor=spec.name
            )
        raw_bytes += numel * ITEMSIZE[spec.dtype]
    _check_sizes(frame, encoding, raw_bytes, key)
    return encoding


def need_supported(encoding: Encoding, key: str) -> None:
    """Refuse an encoding that is reserved for a later release (rule P12)."""
    if encoding.feature is not None and encoding.feature not in SUPPORTED_FEATURES:
        raise UnsupportedFormat(
            f"{key}: uses encoding {encoding.name!r}, which this torch_delta cannot decode; upgrade it (rule P12)",
            rule="P12",
            key=key,
            encoding=encoding.name,
        )


def _check_sizes(frame: Frame, encoding: Encoding, box_bytes: int, key: str) -> None:
    """Rule P10; `box_bytes` are the bytes of all boxes of the frame."""
    if not encoding.blob:
        if frame.stored_bytes or frame.raw_bytes:
            raise broken("P10", key, f"a {frame.encoding} frame states no sizes, they follow from its slices")
        return
    if frame.stored_bytes < 1 or frame.raw_bytes < 1:
        raise broken("P10", key, f"a {frame.encoding} frame states its stored and raw bytes, got 0")
    if frame.raw_bytes != box_bytes:
        kind = "an xor frame decodes to" if frame.encoding == "xor" else f"a {frame.encoding} frame is about"
        raise broken("P10", key, f"{kind} the {box_bytes} bytes of its boxes, it says {frame.raw_bytes}")
    if frame.encoding == "packed" and frame.raw_bytes > MAX_FRAME_RAW_BYTES:
        raise broken("P10", key, f"a packed frame has at most {MAX_FRAME_RAW_BYTES} raw bytes")
    if len(frame.slices) > 1 and frame.raw_bytes > MAX_FRAME_RAW_BYTES:
        raise broken("P10", key, f"a frame of several slices has at most {MAX_FRAME_RAW_BYTES} raw bytes")


def check_absolute(frames: Sequence[Frame], *, key: str) -> None:
    """Check that no frame needs old bits to be decoded, as a stream declared absolute-only promises (rule I5).

    Raises:
        FormatError: a frame has a relative encoding.
    """
    for frame in frames:
        if not ENCODINGS[frame.encoding].absolute:
            raise broken("I5", key, f"a {frame.encoding} frame in a stream declared absolute-only")


def check_slices_disjoint(groups: Sequence[Sequence[Frame]], *, schema: Schema) -> None:
    """Check that no two slices of one version set the same element (rule P1).

    Args:
        groups: the frames of each part of the version.
        schema: of the stream.

    Raises:
        FormatError: two boxes of a tensor overlap.
    """
    boxes: dict[int, list[Box]] = {}
    for frames in groups:
        for frame in frames:
            for item in frame.slices:
                boxes.setdefault(item.tensor, []).append(item.box)
    for tensor, of_tensor in boxes.items():
        if len(of_tensor) > 1:
            check_disjoint(of_tensor, name=schema.tensors[tensor].name)
