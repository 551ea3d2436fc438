"""Two checkpoint folders side by side, read in boxes of bounded size. Files are read, never mapped (F82)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from torch_delta.codec.bits import Bits, bits_dtype
from torch_delta.errors import BaseMismatch, FormatError, StoreUnavailable
from torch_delta.format.box import Box
from torch_delta.receive.folder import SafetensorsFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch_delta.format.schema import Schema

BOX_BYTES: Final = 32 << 20
"""Of one side of a box; a single row of a tensor may be larger."""
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints of the same tensors.

    Attributes:
        old, new: their folders.
        schema: what both hold.
    """

    old: SafetensorsFolder
    new: SafetensorsFolder
    schema: Schema

    @classmethod
    def open(cls, old: Path, new: Path) -> Pair:
        """Read the headers of both.

        Raises:
            BaseMismatch: other tensors, shapes or dtypes in one than in the other; says which.
            FormatError: a folder holds no weights, or damaged ones.
            StoreUnavailable: a file could not be read.
        """
        before, after = SafetensorsFolder.open(old), SafetensorsFolder.open(new)
        schema = before.schema()
        found = after.differences(schema)
        if found:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            shown = "; ".join(found[:_SHOWN]).replace("the stream has no such tensor", f"not in {old}")
            raise BaseMismatch(
                f"{new} does not hold the tensors of {old}: {shown}{more}. Compare two checkpoints of one model, saved "
                "in the same dtypes",
                tensors=tuple(line.partition(":")[0] for line in found),
            )
        return cls(before, after, schema)

    def boxes(self, tensor: int) -> Iterator[Box]:
        """A tensor as boxes of whole rows, of about `BOX_BYTES`."""
        spec = self.schema.tensors[tensor]
        if not spec.numel:
            return
        if not spec.shape:
            yield Box.whole(())
            return
        inner = prod(spec.shape[1:])
        step = max(1, BOX_BYTES // (inner * bits_dtype(spec.dtype).itemsize))
        for at in range(0, spec.shape[0], step):
            rest = spec.shape[1:]
            yield Box((at, *(0 for _ in rest)), (min(step, spec.shape[0] - at), *rest))

    def read(self, folder: SafetensorsFolder, tensor: int, box: Box) -> Bits:
        """Bits of some rows, or of a part of them, of the box's shape.

        Raises:
            FormatError: the file was cut off since its header was read.
            StoreUnavailable: it could not be read.
        """
        spec = self.schema.tensors[tensor]
        location = folder.tensors[spec.name]
        kind = bits_dtype(spec.dtype)
        first, rows = (box.offset[0], box.shape[0]) if box.shape else (0, 1)
        inner = prod(spec.shape[1:])
        bits = np.empty(rows * inner, kind)
        path = folder.path / location.file
        try:
            with path.open("rb") as file:
                file.seek(location.offset_bytes + first * inner * kind.itemsize)
                got = file.readinto(bits.data) if bits.size else 0
        except OSError as error:
            raise StoreUnavailable(
                f"cannot read {path}: {error.strerror}", path=str(path), operation="read the weights"
            ) from error
        if got != bits.nbytes:
            raise FormatError(f"{path}: cut off while it was read", key=location.file, tensor=spec.name)
        if not box.shape:
            return bits.reshape(())
        inside = zip((0, *box.offset[1:]), box.shape, strict=True)
        return bits.reshape((rows, *spec.shape[1:]))[tuple(slice(at, at + size) for at, size in inside)]
