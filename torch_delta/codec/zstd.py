"""zstd as the codec needs it: one compressor per thread, and a decoder that never produces more than it was asked for.

zstandard's compressor objects crash the process when two threads use one at a time, so each thread has its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import zstandard

from torch_delta.format.checks import broken

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_WINDOW_BYTES: Final = 8 << 20
"""What a decoder keeps of the past; levels up to 19 need no more."""
WRITE_LEVELS: Final = range(1, 20)

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_BLOCK_HEADER_BYTES: Final = 3
_RLE: Final = 1
_CHECKSUM_BYTES: Final = 4

_mine = threading.local()


def compressor(level: int) -> Any:
    """This thread's compressor of a level; one stream at a time may be open on it.

    Raises:
        ValueError: the level is outside 1 to 19.
    """
    if level not in WRITE_LEVELS:
        raise ValueError(f"zstd level is {level}; expected 1 to 19")
    by_level: dict[int, Any] = _mine.__dict__.setdefault("compressors", {})
    if level not in by_level:
        by_level[level] = zstandard.ZstdCompressor(level=level, write_checksum=False)
    return by_level[level]


def number_compressor(level: int) -> Any:
    """The same for streams of numbers in which nothing repeats but by chance: what counts is how often each occurs.

    At level 1 only longer matches are looked for, and in few places. Short ones cost more than the numbers they replace
    (0.6 to 1.2% of a version in profile *fast*) and take a quarter to almost half of the time to find.
    """
    if level != 1:
        return compressor(level)
    if "numbers" not in _mine.__dict__:
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)
        _mine.numbers = zstandard.ZstdCompressor(compression_params=parameters)
    return _mine.numbers


def frame_bytes(data: memoryview) -> int | None:
    """Stored size of the zstd frame at the beginning of `data`; None if it is no zstd frame or is cut off.

    Walks the block headers without decompressing anything (RFC 8878, section 3.1.1).
    """
    try:
        if bytes(data[:4]) != _MAGIC:
            return None
        header = zstandard.get_frame_parameters(data)
        at = zstandard.frame_header_size(data)
    except zstandard.ZstdError:
        return None
    last = False
    while not last:
        block = int.from_bytes(data[at : at + _BLOCK_HEADER_BYTES], "little")
        last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        at += _BLOCK_HEADER_BYTES + (1 if kind == _RLE else size)
        if at > len(data):
            return None
    at += _CHECKSUM_BYTES if header.has_checksum else 0
    return at if at <= len(data) else None


class Inflater:
    """Decompresses one zstd frame into buffers the caller provides: memory does not depend on what the frame says.

    Args:
        data: the stored frame and nothing else.
        key: of the part, for messages.

    Raises:
        FormatError: not one whole zstd frame, or bytes after it (rule E3).
    """

    def __init__(self, data: memoryview, *, key: str) -> None:
        self._key = key
        size = frame_bytes(data)
        if size != len(data):
            found = "is cut off or no zstd frame" if size is None else f"ends after {size} bytes"
            raise broken("E3", key, f"an xor frame of {len(data)} stored bytes {found}", expected=len(data), got=size)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(data, read_across_frames=False)
        self._done = 0

    def fill(self, target: npt.NDArray[Any]) -> None:
        """Fill a contiguous array with the next bytes.

        Raises:
            FormatError: the frame holds fewer bytes, or is damaged (rule E3).
        """
        view = target.reshape(-1).view("u1").data
        at = 0
        while at < len(view):
            got = self._read(view[at:])
            if not got:
                raise broken("E3", self._key, f"an xor frame decodes to {self._done} bytes, fewer than its raw bytes")
            at += got
            self._done += got

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            FormatError: the frame holds more bytes (rule E3).
        """
        if self._read(memoryview(bytearray(1))):
            raise broken("E3", self._key, f"an xor frame decodes to more than its {self._done} raw bytes")

    def _read(self, view: memoryview) -> int:
        try:
            return int(self._stream.readinto(view))
        except zstandard.ZstdError as error:
            raise broken("E3", self._key, f"damaged zstd frame after {self._done} bytes: {error}") from error
