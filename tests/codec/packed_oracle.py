"""`packed` in plain Python and from the text of docs/format.md only; shares no code with the package."""

from __future__ import annotations

import zstandard

from scripts import make_golden_packed
from scripts.make_golden_packed import ORDER, STREAMS, Piece, class_of, ordered, streams
from scripts.make_golden_stream import varint

__all__ = ["NAMES", "ORDER", "Piece", "blob", "decode", "ordered", "split", "streams", "varint", "varints"]

NAMES = STREAMS


def varints(data: bytes) -> list[int]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    assert not shift
    return values


def bits_of(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


def blob(check: bytes, content: dict[str, bytes], compressed: tuple[str, ...] = ()) -> bytes:
    zstd = {name: zstandard.ZstdCompressor().compress(content[name]) for name in compressed}
    return make_golden_packed.blob(check, content, zstd)


def split(data: bytes) -> dict[str, bytes]:
    """Streams of a blob, decompressed."""
    at, entries = 16, []

    def take() -> int:
        nonlocal at
        end = at
        while data[end] > 127:
            end += 1
        [value] = varints(data[at : end + 1])
        at = end + 1
        return value

    for name in NAMES:
        entry = take()
        entries.append((name, entry >> 1, take() if entry & 1 else None))
    out = {}
    for name, size, stored in entries:
        raw = data[at : at + (size if stored is None else stored)]
        at += len(raw)
        out[name] = raw if stored is None else zstandard.ZstdDecompressor().decompress(raw)
        assert len(out[name]) == size
    assert at == len(data)
    return out


def decode(data: bytes, slices: list[tuple[str, int, int, list[int]]]) -> list[dict[int, int]]:
    """New bits by position for each slice.

    Args:
        data: the blob of a frame.
        slices: dtype, bytes per element, count and old bits of each slice.
    """
    content = split(data)
    head, high_rest, size_rest = (iter(varints(content[name])) for name in ("head", "high_rest", "size_rest"))
    high0, high = iter(content["high0"]), iter(content["high"])
    mask, sign, size, low = (iter(bits_of(content[name])) for name in ("mask", "sign", "size", "low"))
    results = []
    for dtype, width, count, old in slices:
        signed = ORDER.get(dtype, (0, 0, False))[2]
        first = next(head)
        boundary = first - 1 if first else None
        last, left = (7 if first else 0), count
        result: dict[int, int] = {}
        for c in range(last + 1):
            if not left:
                break
            here = next(head) if c < last else left
            left -= here
            if not here:
                continue
            members = [i for i, u in enumerate(old) if class_of(u, dtype, boundary) == c]
            mode = next(head)
            if mode == 31:
                assert next(head) == len(members)
                places = [i for i in members if next(mask)]
            else:
                places, rank = [], -1
                for _ in range(here):
                    part = next(high if mode else high0)
                    part += next(high_rest) if part == 255 else 0
                    rank += 1 + (part << mode) + sum(next(low) << i for i in range(mode))
                    places.append(members[rank])
            assert len(places) == here
            for i in places:
                excess = next(size) + 2 * next(size)
                excess += next(size_rest) if excess == 3 else 0
                step = -(excess + 1) if next(sign) else excess + 1
                full = 1 << 8 * width
                result[i] = ordered((ordered(old[i], width, signed) + step) % full, width, signed)
        results.append(result)
    return results
