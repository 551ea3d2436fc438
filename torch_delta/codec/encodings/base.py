"""What an encoding is: how the slices of one frame become payload bytes, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch_delta.codec.bits import Bits
    from torch_delta.codec.change import Change
    from torch_delta.format.frames import Frame, Slice
    from torch_delta.format.part import BytesLike
    from torch_delta.format.schema import Schema

Payload = Mapping[str, "BytesLike"]
"""Payload bytes of one frame, by payload tensor name."""
OldRegion = Callable[["Slice"], "Bits"]
"""The reader's own bits of a slice's box at version v-1: shape of the box, a view, checked for dtype and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One frame's worth of payload.

    Attributes:
        payload: by payload tensor name.
        stored_bytes: of a blob as stored; 0 for encodings whose sizes follow from the slices.
        raw_bytes: of a blob once decompressed; 0 for the same.
        measured: what each change cost, in bytes, where that is known only now; empty otherwise.
    """

    payload: Payload
    stored_bytes: int = 0
    raw_bytes: int = 0
    measured: tuple[int, ...] = ()


class Encoding(Protocol):
    """One entry of the registry. Stateless; every method may be called from any thread.

    `packed` needs more of the old region than the changed elements, namely which exponents lie between them. Whoever
    collects changes reduces them while the region is at hand (`packed.reduced`); `pack` finishes in the background.
    """

    name: str
    """As frames carry it."""
    is_absolute: bool
    """Whether decoding needs no old bits."""

    def fewest_bytes(self, schema: Schema, change: Change) -> int | None:
        """Payload bytes the change takes: exact for encodings of fixed layout, a lower bound for compressed ones.

        Returns:
            None if the encoding cannot carry the change.
        """
        ...

    def estimated_bytes(self, change: Change, *, level: int) -> int | None:
        """What a compressed encoding would take, from a sample; None where it is not worth a try, or cannot be told.

        Args:
            change: to be carried.
            level: of zstd.
        """
        ...

    def pack(self, schema: Schema, changes: Sequence[Change], *, level: int) -> Packed:
        """Encode the slices of one frame.

        Args:
            schema: of the stream.
            changes: ascending by (tensor, offset), each one the encoding can carry.
            level: of zstd, where it is used.
        """
        ...

    def unpack(
        self, schema: Schema, frame: Frame, payload: Mapping[str, memoryview], old: OldRegion, *, key: str
    ) -> Iterator[Change]:
        """Decode the slices of a frame to absolute changes.

        The frame and the payload's sizes are checked already; this checks what the payload contains, except for the
        digest increments. Nothing an iterator has yielded may be used before it has ended without an error.

        Raises:
            FormatError: the payload breaks a rule E1 to E4.
            DigestMismatch: the old bits here are not the writer's.
        """
        ...
