"""The bytes of an anchor's files on their way: headers made, staged objects read in blocks, everything hashed."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_delta.format.schema import Schema
    from torch_delta.store.base import Store


class Window:
    """Reads a staged object mostly forwards, a block at a time instead of a request per box."""

    def __init__(self, store: Store, key: str, window_bytes: int) -> None:
        self._store = store
        self._key = key
        self._window_bytes = window_bytes
        self._start = 0
        self._data = b""
        self.size_bytes = 0

    def read(self, start: int, length: int) -> memoryview:
        """Bytes of the object; the view is valid until the next read."""
        if not self._start <= start <= start + length <= self._start + len(self._data):
            wanted = min(max(length, self._window_bytes), self.size_bytes - start)
            self._data = self._store.get_range(self._key, start, wanted)
            self._start = start
        return memoryview(self._data)[start - self._start : start - self._start + length]


class HashedStream:
    """Pieces on their way into a store, hashed as they pass."""

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces = pieces
        self.sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces:
            self.sha256.update(piece)
            yield piece


def safetensors_header(schema: Schema, tensors: Sequence[int]) -> bytes:
    """Length and header of a safetensors file that holds these tensors one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        spec = schema.tensors[tensor]
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
