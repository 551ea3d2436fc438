"""The outer file of a part: a plain safetensors file, so that any tool can open it. Written and checked here."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

from torch_delta.errors import FormatError
from torch_delta.format.checks import Fields, broken
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.limits import MAX_DIMS, MAX_HEADER_BYTES
from torch_delta.format.sealed import load_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

METADATA = "torch_delta"


def write_header(metadata: Mapping[str, Any], tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The length field and JSON header of a file whose data follow in the order given.

    Args:
        metadata: becomes the JSON value of ``__metadata__["torch_delta"]``.
        tensors: name, dtype and shape of each data tensor, widest dtype first so that each is aligned.
    """
    header: dict[str, Any] = {
        "__metadata__": {METADATA: json.dumps(metadata, sort_keys=True, separators=(",", ":"))},
    }
    at = 0
    for name, dtype, shape in tensors:
        end = at + prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(buffer: memoryview, *, key: str) -> tuple[Fields, dict[str, tuple[str, memoryview]]]:
    """Check the layout of a whole file before anything in it is used.

    Args:
        buffer: the stored bytes, format "B".
        key: of the part, for messages.

    Returns:
        The fields of ``__metadata__["torch_delta"]``, and dtype and bytes of every data tensor by name.

    Raises:
        FormatError: one of rules P2, P4, P11 is broken.
    """
    if len(buffer) < 8:
        raise broken("P11", key, f"a part has at least 8 bytes, got {len(buffer)}: truncated")
    length = int.from_bytes(buffer[:8], "little")
    if length > MAX_HEADER_BYTES or length % 8 or length > len(buffer) - 8:
        raise broken(
            "P11",
            key,
            f"header of {length} bytes in a part of {len(buffer)}: must be a multiple of 8, at most {MAX_HEADER_BYTES} "
            f"and inside the file",
        )
    try:
        header = load_json(buffer[8 : 8 + length], key=key, max_bytes=MAX_HEADER_BYTES)
    except FormatError as error:
        raise broken("P11", key, f"bad header: {error.message}") from error
    if bytes(buffer[8:9]) != b"{":
        raise broken("P11", key, "the header begins with '{'")
    metadata = header.pop("__metadata__", None)
    text = metadata.get(METADATA) if type(metadata) is dict else None
    if type(text) is not str:
        raise broken("P4", key, f"__metadata__ has no text {METADATA!r}: not a part of a stream")
    try:
        fields = Fields(load_json(text.encode(), key=key, max_bytes=MAX_HEADER_BYTES), key=key, where=f"{METADATA}.")
    except FormatError as error:
        raise broken("P4", key, f"bad {METADATA} metadata: {error.message}") from error
    return fields, _tensors(header, buffer[8 + length :], key)


def _tensors(header: dict[str, Any], data: memoryview, key: str) -> dict[str, tuple[str, memoryview]]:
    """Rule P2: the tensors tile the data exactly, each aligned and as large as its shape says."""
    extents: list[tuple[int, int, str]] = []
    dtypes: dict[str, str] = {}
    for name, entry in header.items():
        try:
            fields = Fields(entry, key=key, where=f"{name}.")
            dtype = fields.text("dtype")
            shape = fields.items("shape", int, max_items=MAX_DIMS, rule="P2")
            offsets = fields.items("data_offsets", int, max_items=2, rule="P2")
        except FormatError as error:
            raise broken("P2", key, f"bad entry of tensor {name!r}: {error.message}") from error
        width = ITEMSIZE.get(dtype)
        if width is None or min(shape, default=0) < 0 or len(offsets) != 2:
            raise broken("P2", key, f"tensor {name!r} has dtype {dtype!r}, shape {shape}, offsets {offsets}")
        begin, end = offsets
        if end - begin != prod(shape) * width or begin % width:
            raise broken("P2", key, f"tensor {name!r} at {offsets} is misaligned or not the size of {dtype} {shape}")
        extents.append((begin, end, name))
        dtypes[name] = dtype
    tensors: dict[str, tuple[str, memoryview]] = {}
    at = 0
    for begin, end, name in sorted(extents):
        if begin != at:
            raise broken(
                "P2", key, f"tensor {name!r} begins at {begin}, the one before it ends at {at}: hole or overlap"
            )
        tensors[name] = (dtypes[name], data[begin:end])
        at = end
    if at != len(data):
        raise broken("P2", key, f"the tensors end at {at}, the file has {len(data)} bytes of data")
    return tensors
