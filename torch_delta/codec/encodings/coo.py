"""`coo`: indices and values, the encoding anybody can read with a safetensors reader and an indexed assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.bits import as_bytes, bits_dtype, gather
from torch_delta.codec.change import Change
from torch_delta.codec.encodings.base import Packed
from torch_delta.format.checks import broken
from torch_delta.format.encodings import coo_index_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_delta.codec.bits import Index
    from torch_delta.codec.encodings.base import OldRegion
    from torch_delta.format.frames import Frame, Slice
    from torch_delta.format.schema import Schema

_INDEX_DTYPES: dict[str, np.dtype[Any]] = {"coo.index.u32": np.dtype("<u4"), "coo.index.u64": np.dtype("<u8")}


class Coo:
    """Fixed layout: an index of 4 or 8 bytes and a value per changed element."""

    name = "coo"
    is_absolute = True

    def fewest_bytes(self, schema: Schema, change: Change) -> int | None:  # noqa: ARG002  part of the interface
        """Exact."""
        return change.count * (_INDEX_DTYPES[coo_index_name(change.box.numel)].itemsize + change.new.itemsize)

    def estimated_bytes(self, change: Change, *, level: int) -> int | None:  # noqa: ARG002  part of the interface
        """Never needed: its size is known."""
        return None

    def pack(self, schema: Schema, changes: Sequence[Change], *, level: int) -> Packed:  # noqa: ARG002
        """Views of the changes' own arrays where a frame has one slice; one copy otherwise."""
        pieces: dict[str, list[memoryview]] = {}
        for change in changes:
            name = coo_index_name(change.box.numel)
            index = change.positions().astype(_INDEX_DTYPES[name], copy=False)
            pieces.setdefault(name, []).append(as_bytes(index))
            value = f"coo.value.{schema.tensors[change.tensor].dtype}"
            pieces.setdefault(value, []).append(as_bytes(change.new))
        return Packed(
            payload={name: views[0] if len(views) == 1 else b"".join(views) for name, views in pieces.items()}
        )

    def unpack(
        self, schema: Schema, frame: Frame, payload: Mapping[str, memoryview], old: OldRegion, *, key: str
    ) -> Iterator[Change]:
        """Index and values are views of the payload."""
        ends = dict.fromkeys(payload, 0)
        for item in frame.slices:
            spec = schema.tensors[item.tensor]
            arrays = []
            index_name = coo_index_name(item.box.numel)
            for name, dtype in (
                (index_name, _INDEX_DTYPES[index_name]),
                (f"coo.value.{spec.dtype}", bits_dtype(spec.dtype)),
            ):
                arrays.append(np.frombuffer(payload[name], dtype, item.count, ends[name]))
                ends[name] += item.count * dtype.itemsize
            index, new = arrays
            _check_index(index, item, spec.name, key)
            if index.itemsize == 8:
                index = index.view("<i8")  # below 2**48 by now, and what `Change` has for large boxes
            before = gather(old(item), index)
            yield Change(tensor=item.tensor, box=item.box, index=index, old=before, new=new, increment=item.increment)


def _check_index(index: Index, item: Slice, tensor: str, key: str) -> None:
    """Rule E1: an index out of range would write elsewhere, or crash a device (F65)."""
    if not bool((index[1:] > index[:-1]).all()):
        at = int(np.argmin(index[1:] > index[:-1]))
        raise broken(
            "E1",
            key,
            f"indices of {tensor!r} must increase; {int(index[at + 1])} follows {int(index[at])}",
            tensor=tensor,
            got=int(index[at + 1]),
        )
    if index.size and int(index[-1]) >= item.box.numel:
        raise broken(
            "E1",
            key,
            f"index {int(index[-1])} of {tensor!r} is outside its box of {item.box.numel} elements",
            tensor=tensor,
            expected=item.box.numel,
            got=int(index[-1]),
        )
