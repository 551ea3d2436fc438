"""The streams of a frame, and how they become one blob and come back.

    blob      := base check (16 bytes)  directory  stored bytes of each stream, in the order of `NAMES`
    directory := raw_size*2+z [stored_size]   per stream; z: the stored bytes are one zstd frame, else they are raw

The sizes of most streams follow from the head; a decoder compares before it decompresses anything but the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zstandard

from torch_delta.codec.zstd import frame_bytes, number_compressor
from torch_delta.format.checks import broken
from torch_delta.format.table import encode_varint

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES: Final = ("head", "high0", "high", "high_rest", "mask", "sign", "size", "size_rest", "low")
"""head: see `head.py`. high0, high: a byte per gap, of lists with shift 0 and of the others. high_rest: what of a high
part does not fit a byte, varints. mask: bits. sign: a bit per step. size: two bits per step. size_rest: varints.
low: low bits of gaps."""
_NOT_COMPRESSED = frozenset({"low"})  # nothing to gain
_FEWEST_COMPRESSED_BYTES = 24
_ENTRY_BYTES = 5  # sizes are below 2**34


def seal(check: bytes, streams: Mapping[str, bytes | memoryview], *, level: int) -> tuple[list[bytes], dict[str, int]]:
    """Lay out a frame.

    Args:
        check: the base check.
        streams: by name; all of `NAMES`.
        level: of zstd.

    Returns:
        Pieces of the blob, and stored size by stream.
    """
    directory: list[bytes] = []
    stored: list[bytes] = []
    for name in NAMES:
        raw = streams[name]
        size = len(raw)
        data = bytes(raw)
        is_small = name not in _NOT_COMPRESSED and size >= _FEWEST_COMPRESSED_BYTES
        packed = number_compressor(level).compress(raw) if is_small else data
        is_packed = len(packed) < size
        directory.append(encode_varint(2 * size + is_packed))
        if is_packed:
            directory.append(encode_varint(len(packed)))
        stored.append(packed if is_packed else data)
    return [check, *directory, *stored], dict(zip(NAMES, map(len, stored), strict=True))


class SealedStreams:
    """A frame's streams as stored; decompressed one by one once their size is known to be right (rule E7).

    Args:
        blob: behind the base check.
        key: of the part, for messages.

    Raises:
        FormatError: rule E7 is broken.
    """

    def __init__(self, blob: memoryview, *, key: str) -> None:
        self._key = key
        self.raw_bytes: dict[str, int] = {}
        """Declared size by stream."""
        self._stored: dict[str, tuple[bool, memoryview]] = {}
        at = 0
        entries: list[tuple[str, bool, int]] = []
        for name in NAMES:
            entry, at = self._varint(blob, at)
            self.raw_bytes[name] = size = entry >> 1
            if entry & 1:
                size, at = self._varint(blob, at)
            entries.append((name, bool(entry & 1), size))
        for name, is_packed, size in entries:
            if at + size > len(blob):
                raise broken("E7", key, f"stream {name!r} of a packed frame has {len(blob) - at} of its {size} bytes")
            self._stored[name] = is_packed, blob[at : at + size]
            at += size
        if at != len(blob):
            raise broken("E7", key, f"{len(blob) - at} bytes after the last stream of a packed frame")

    def _varint(self, blob: memoryview, at: int) -> tuple[int, int]:
        value = 0
        for number in range(_ENTRY_BYTES):
            if at + number >= len(blob):
                raise broken("E7", self._key, "a packed frame ends inside its directory")
            byte = blob[at + number]
            value |= (byte & 127) << 7 * number
            if byte < 128:
                if number and not byte:
                    break
                return value, at + number + 1
        raise broken("E7", self._key, "a varint in the directory of a packed frame is longer than needed or too large")

    def load(self, name: str, most: int, *, fewest: int | None = None) -> memoryview:
        """Bytes of a stream.

        Args:
            name: of the stream.
            most: bytes it may have.
            fewest: bytes it must have; None: as many as `most`.

        Raises:
            FormatError: it declares another size, or does not decode to that size (rule E7).
        """
        size = self.raw_bytes[name]
        fewest = most if fewest is None else fewest
        if not fewest <= size <= most:
            expected = f"{most}" if fewest == most else f"{fewest} to {most}"
            raise broken(
                "E7",
                self._key,
                f"stream {name!r} of a packed frame declares {size} bytes; expected {expected}",
                expected=expected,
                got=size,
            )
        is_packed, stored = self._stored[name]
        if not is_packed:
            return stored
        if frame_bytes(stored) != len(stored) or zstandard.frame_content_size(stored) != size:
            raise broken(
                "E7", self._key, f"stream {name!r} is not one whole zstd frame that says it holds {size} bytes"
            )
        try:
            data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
        except zstandard.ZstdError as error:
            raise broken("E7", self._key, f"stream {name!r} is damaged: {error}") from error
        if len(data) != size:
            raise broken("E7", self._key, f"stream {name!r} decodes to {len(data)} bytes, not {size}")
        return memoryview(data)
