"""Frames of a part back to changes, absolute and proved: nothing is written here, and nothing unproved is returned.

    payload ──unpack──▶ index, old bits here, new bits ──digest increment──▶ equal to the slice's? ──▶ caller may write

The increment is recomputed from the reader's own old bits, so damage in the payload and old bits that are not the
writer's are caught in O(changed). What is returned is absolute: writing it twice changes nothing (F06, F08, F26).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.codec.bits import Bits, bits_dtype
from torch_delta.codec.encodings import REGISTRY
from torch_delta.errors import BaseMismatch, DigestMismatch, UnsupportedFormat
from torch_delta.format.checks import broken
from torch_delta.format.frames import check_frame
from torch_delta.format.part import payload_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_delta.codec.change import Change
    from torch_delta.format.box import Box
    from torch_delta.format.frames import Frame, Slice
    from torch_delta.format.part import BytesLike
    from torch_delta.format.schema import Schema


def decode_frame(
    schema: Schema,
    frame: Frame,
    payload: Mapping[str, BytesLike],
    read_old: Callable[[int, Box], Bits],
    *,
    key: str = "part",
) -> list[Change]:
    """Decode one frame and prove it against the old bits.

    Thread-safe; the heavy loops release the GIL. Extra memory: one window of 8 MiB and O(changed), whatever the payload
    declares.

    Args:
        schema: of the stream.
        frame: what the part's table says.
        payload: exactly the frame's bytes, by payload tensor name (`Part.payload`).
        read_old: own bits of a box of a tensor (schema index) at the version before, of the box's shape; may be a view
            and may be strided, and is only read.
        key: of the part, for messages.

    Returns:
        One change per slice, in order. `index` is None for `dense`; `old` are the bits here. Arrays may be views of the
        payload, of what `read_old` returned, and of one array for the whole frame.

    Raises:
        FormatError: the frame or its payload breaks a rule.
        DigestMismatch: the old bits here are not the writer's, or the payload is damaged.
        BaseMismatch: the tensor here has another shape or element width.
        UnsupportedFormat: an encoding this package cannot decode.
    """
    check_frame(frame, schema=schema, key=key)
    entry = REGISTRY.get(frame.encoding)
    if entry is None:
        raise UnsupportedFormat(
            f"{key}: cannot decode encoding {frame.encoding!r}; upgrade torch_delta (rule P12)",
            rule="P12",
            key=key,
            encoding=frame.encoding,
        )
    views = {name: memoryview(data).cast("B") for name, data in payload.items()}
    expected, got = payload_sizes(frame, schema), {name: len(view) for name, view in views.items()}
    if expected != got:
        raise broken(
            "P3", key, f"a {frame.encoding} frame needs payload bytes {expected}, got {got}", expected=expected, got=got
        )

    def old(item: Slice) -> Bits:
        return _checked_region(schema, item, read_old(item.tensor, item.box))

    changes = list(entry.unpack(schema, frame, views, old, key=key))
    for change, item in zip(changes, frame.slices, strict=True):
        increment = change.computed_increment(schema)
        if increment != item.increment:
            name = schema.tensors[item.tensor].name
            raise DigestMismatch(
                f"{key}: applied to the bits here, a slice of {name!r} adds {increment} to its digest, the writer says "
                f"{item.increment}: the old bits are not the ones the delta was made from, or the payload is damaged; "
                "nothing was written. Start again from an anchor or a fresh copy of the base (rule E5)",
                tensor=name,
                box=item.box,
                key=key,
                expected=item.increment.hex(),
                got=increment.hex(),
            )
    return changes


def _checked_region(schema: Schema, item: Slice, region: Bits) -> Bits:
    """Refuse weights of another shape or width instead of reinterpreting them (F22, F59)."""
    spec = schema.tensors[item.tensor]
    kind = bits_dtype(spec.dtype)
    if region.shape != tuple(item.box.shape) or region.dtype != kind:
        raise BaseMismatch(
            f"{spec.name}: the bits here are {region.dtype} {region.shape} for a box of shape {item.box.shape} and "
            f"dtype {spec.dtype}; the local copy is not of this stream",
            tensors=[spec.name],
            expected=(str(kind), tuple(item.box.shape)),
            got=(str(region.dtype), region.shape),
        )
    return region
