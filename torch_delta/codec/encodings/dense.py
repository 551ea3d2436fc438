"""`dense`: every element of the box, for boxes where most changed and for re-sent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_delta.codec.bits import as_bytes, bits_dtype
from torch_delta.codec.change import Change
from torch_delta.codec.encodings.base import Packed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_delta.codec.encodings.base import OldRegion
    from torch_delta.format.frames import Frame
    from torch_delta.format.schema import Schema


class Dense:
    """Fixed layout: a value per element of the box."""

    name = "dense"
    is_absolute = True

    def fewest_bytes(self, schema: Schema, change: Change) -> int | None:  # noqa: ARG002  part of the interface
        """Exact; None without the bits of the whole box."""
        return None if change.whole is None else change.whole.nbytes

    def estimated_bytes(self, change: Change, *, level: int) -> int | None:  # noqa: ARG002  part of the interface
        """Never needed: its size is known."""
        return None

    def pack(self, schema: Schema, changes: Sequence[Change], *, level: int) -> Packed:  # noqa: ARG002
        """Views of the changes' own arrays where a frame has one slice; one copy otherwise."""
        pieces: dict[str, list[memoryview]] = {}
        for change in changes:
            assert change.whole is not None
            name = f"dense.{schema.tensors[change.tensor].dtype}"
            pieces.setdefault(name, []).append(as_bytes(change.whole))
        return Packed(
            payload={name: views[0] if len(views) == 1 else b"".join(views) for name, views in pieces.items()}
        )

    def unpack(
        self, schema: Schema, frame: Frame, payload: Mapping[str, memoryview], old: OldRegion, *, key: str
    ) -> Iterator[Change]:
        """Values are views of the payload, old bits a view of the reader's own; there is nothing to check."""
        del key
        ends = dict.fromkeys(payload, 0)
        for item in frame.slices:
            spec = schema.tensors[item.tensor]
            name, dtype = f"dense.{spec.dtype}", bits_dtype(spec.dtype)
            new = np.frombuffer(payload[name], dtype, item.count, ends[name])
            ends[name] += item.count * dtype.itemsize
            before = old(item).reshape(-1)
            yield Change(tensor=item.tensor, box=item.box, index=None, old=before, new=new, increment=item.increment)
