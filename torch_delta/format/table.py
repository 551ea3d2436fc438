"""The slice table of a part: frames and slices as varints, and one digest increment per slice.

    table      := num_frames frame*
    frame      := encoding_code num_slices [stored_bytes raw_bytes] slice*       sizes for blob encodings only
    slice      := (tensor_step * 4 + box_kind) box [count]                       count for counted encodings only
    box        := ""                          kind 0: the whole tensor
                | first_row num_rows          kind 1: rows of the first dim, whole in all others
                | (first extent) per dim      kind 2: any other box

Every symbol is an unsigned LEB128 varint. `tensor_step` is the schema index minus that of the slice before it in the
frame (minus 0 for the first). The increments lie in a tensor of their own, 16 bytes per slice, in the same order.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from torch_delta.errors import UnsupportedFormat
from torch_delta.format.box import Box
from torch_delta.format.checks import broken
from torch_delta.format.digest import DIGEST_BYTES, Digest
from torch_delta.format.encodings import BY_CODE
from torch_delta.format.frames import Frame, Slice, check_frame, need_supported
from torch_delta.format.limits import MAX_SLICES, MAX_TABLE_BYTES, MAX_VARINT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_delta.format.schema import Schema

WHOLE: Final = 0
ROWS: Final = 1
ANY: Final = 2


def encode_varint(value: int) -> bytes:
    """The shortest unsigned LEB128 form.

    Raises:
        FormatError: outside `[0, 2**63)` (rule P5).
    """
    if not 0 <= value <= MAX_VARINT:
        raise broken("P5", "table", f"varints lie in [0, 2**63), got {value}")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varints(data: bytes | memoryview, *, key: str) -> list[int]:
    """Decode a string that consists of varints only.

    Raises:
        FormatError: one is cut off, longer than needed, or 2**63 or more (rule P5).
    """
    values: list[int] = []
    append = values.append
    value = shift = 0
    for byte in bytes(data):
        if byte > 127:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 56:  # the ninth byte ends the longest number below 2**63
                raise broken("P5", key, f"varint {len(values)} of the table is 2**63 or more")
        elif shift:
            if not byte:
                raise broken("P5", key, f"varint {len(values)} of the table is longer than needed")
            append(value | byte << shift)
            value = shift = 0
        else:
            append(byte)
    if shift:
        raise broken("P5", key, "the table ends inside a varint")
    return values


def encode_table(frames: Sequence[Frame], *, schema: Schema, key: str) -> tuple[bytes, bytes]:
    """The tensors `table` and `increment` of a part.

    Raises:
        FormatError: the frames break one of rules P6 to P10.
    """
    small = [bytes((value,)) for value in range(128)]

    def varint(value: int) -> bytes:
        return small[value] if value < 128 else encode_varint(value)

    out: list[bytes] = [varint(len(frames))]
    put = out.append
    increments: list[int] = []
    tensors = schema.tensors
    for frame in frames:
        encoding = check_frame(frame, schema=schema, key=key)
        put(varint(encoding.code) + varint(len(frame.slices)))
        if encoding.blob:
            put(varint(frame.stored_bytes) + varint(frame.raw_bytes))
        previous = 0
        for item in frame.slices:
            offset, extents, full = item.box.offset, item.box.shape, tensors[item.tensor].shape
            kind = WHOLE if extents == full else ROWS if extents[1:] == full[1:] else ANY
            put(varint((item.tensor - previous) * 4 + kind))
            if kind == ROWS:
                put(varint(offset[0]) + varint(extents[0]))
            elif kind == ANY:
                for at, extent in zip(offset, extents, strict=True):
                    put(varint(at) + varint(extent))
            if encoding.counted:
                put(varint(item.count))
            increments += item.increment.lanes
            previous = item.tensor
    table = b"".join(out)
    num_slices = len(increments) // 2
    if num_slices > MAX_SLICES or len(table) > MAX_TABLE_BYTES:
        raise broken("P6", key, f"{num_slices} slices are too many for one part ({MAX_SLICES}); write several parts")
    return table, struct.pack(f"<{len(increments)}Q", *increments)


def decode_table(
    table: bytes | memoryview,
    increment: bytes | memoryview,
    *,
    schema: Schema,
    key: str,
) -> tuple[Frame, ...]:
    """Parse and check the tables of a part.

    Args:
        table: bytes of the tensor `table`.
        increment: bytes of the tensor `increment`.
        schema: of the stream.
        key: of the part, for messages.

    Raises:
        FormatError: one of rules P5 to P10 is broken.
        UnsupportedFormat: an encoding of a later release.
    """
    if len(table) > MAX_TABLE_BYTES or len(increment) > MAX_SLICES * DIGEST_BYTES:
        raise broken(
            "P6", key, f"a table of {len(table)} bytes, {len(increment) // DIGEST_BYTES} increments: too large"
        )
    if len(increment) % DIGEST_BYTES:
        raise broken("P6", key, f"increments have {DIGEST_BYTES} bytes each, got {len(increment)} in all")
    values = decode_varints(table, key=key)
    digests = [Digest(lanes) for lanes in struct.iter_unpack("<QQ", increment)]
    numbers = iter(values)
    take = numbers.__next__
    frames: list[Frame] = []
    used = 0
    try:
        for _ in range(take()):
            code, num_slices = take(), take()
            encoding = BY_CODE.get(code)
            if encoding is None:
                raise UnsupportedFormat(
                    f"{key}: encoding code {code} is not known to this torch_delta; upgrade it (rule P12)",
                    rule="P12",
                    key=key,
                    encoding=code,
                )
            need_supported(encoding, key)
            if num_slices > len(digests) - used:
                raise broken(
                    "P6", key, f"frame {len(frames)} says {num_slices} slices, {len(digests) - used} increments"
                )
            stored_bytes, raw_bytes = (take(), take()) if encoding.blob else (0, 0)
            part = digests[used : used + num_slices]
            slices = _decode_slices(take, part, schema=schema, counted=encoding.counted, key=key)
            frame = Frame(encoding.name, slices, stored_bytes, raw_bytes)
            check_frame(frame, schema=schema, key=key)
            frames.append(frame)
            used += num_slices
    except StopIteration:
        raise broken("P6", key, f"the table ends inside frame {len(frames)}") from None
    if next(numbers, None) is not None or used != len(digests):
        raise broken(
            "P6", key, f"bytes after the last frame of the table, or {len(digests) - used} increments too many"
        )
    return tuple(frames)


def _decode_slices(
    take: Callable[[], int],
    increments: Sequence[Digest],
    *,
    schema: Schema,
    counted: bool,
    key: str,
) -> tuple[Slice, ...]:
    """The slices of one frame; only what is needed to find the next number is checked here."""
    slices: list[Slice] = []
    tensors = schema.tensors
    whole: dict[tuple[int, ...], Box] = {}
    tensor = 0
    for increment in increments:
        step = take()
        tensor += step >> 2
        kind = step & 3
        if tensor >= len(tensors):
            raise broken("P7", key, f"slice of tensor {tensor}, the schema has {len(tensors)}", tensor=tensor)
        full = tensors[tensor].shape
        if kind == WHOLE:
            box = whole.get(full)
            if box is None:
                box = whole[full] = Box.whole(full)
        elif kind == ROWS and full:
            box = Box((take(), *(0,) * (len(full) - 1)), (take(), *full[1:]))
        elif kind == ANY:
            pairs = [(take(), take()) for _ in full]
            box = Box(tuple(at for at, _ in pairs), tuple(extent for _, extent in pairs))
        else:
            raise broken("P8", key, f"box kind {kind} in a tensor of shape {full}")
        # One way to write a box: the smallest kind that can.
        if kind != WHOLE and (box.shape == full or (kind == ANY and box.shape[1:] == full[1:])):
            raise broken("P8", key, f"box {box.offset} {box.shape} of a tensor of shape {full} written as kind {kind}")
        slices.append(Slice(tensor, box, take() if counted else box.numel, increment))
    return tuple(slices)
