"""The content side of the local Hub: what hf-xet uploads and downloads, in memory.

A file is a list of runs of chunks in *xorbs*; a *shard* tells which. Only what hf-xet 1.5 to 1.8 sends is understood.
"""

from __future__ import annotations

import re
import secrets
import struct
from dataclasses import dataclass, field

ENTRY = 48
BOOKEND = b"\xff" * 32
CHUNK_BYTES = 64 << 10
NOTHING = "0" * 64  # the hash of no bytes


@dataclass
class Xorb:
    data: bytes
    chunks: list[tuple[int, int, int]]  # begin and end in `data`, unpacked length


@dataclass
class Run:
    xorb: str
    num_bytes: int
    first: int
    last: int  # one past it


@dataclass
class Cas:
    files: dict[str, list[Run]] = field(default_factory=lambda: {NOTHING: []})
    xorbs: dict[str, Xorb] = field(default_factory=dict)

    def size(self, file: str) -> int | None:
        runs = self.files.get(file)
        return None if runs is None else sum(run.num_bytes for run in runs)

    def add_xorb(self, name: str, data: bytes) -> None:
        chunks, at = [], 0
        while at + 8 <= len(data) and data[at] == 0:
            packed, unpacked = (int.from_bytes(data[at + begin : at + begin + 3], "little") for begin in (1, 5))
            if at + 8 + packed > len(data) or unpacked == 0:
                break
            chunks.append((at, at + 8 + packed, unpacked))
            at += 8 + packed
        assert chunks, "a xorb without chunks"
        self.xorbs[name] = Xorb(data, chunks)

    def add_shard(self, data: bytes) -> None:
        at = 48  # magic, version, length of the footer
        while data[at : at + 32] != BOOKEND:
            name, flags, num_runs = data[at : at + 32], *struct.unpack_from("<II", data, at + 32)
            runs = []
            for number in range(num_runs):
                begin = at + ENTRY * (number + 1)
                _, num_bytes, first, last = struct.unpack_from("<IIII", data, begin + 32)
                runs.append(Run(text_of(data[begin : begin + 32]), num_bytes, first, last))
                assert sum(chunk[2] for chunk in self.xorbs[runs[-1].xorb].chunks[first:last]) == num_bytes
            self.files[text_of(name)] = runs
            # Each run may have a verification entry, and the file one with its SHA-256.
            at += ENTRY * (1 + num_runs * (2 if flags & 1 << 31 else 1) + (1 if flags & 1 << 30 else 0))

    def add_plain(self, data: bytes) -> str:
        """A file as no client uploads it: its chunks are not packed and its hash is made up."""
        if not data:
            return NOTHING
        file, xorb = secrets.token_hex(32), secrets.token_hex(32)
        packed = bytearray()
        for begin in range(0, len(data), CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            length = len(chunk).to_bytes(3, "little")
            packed += b"\0" + length + b"\0" + length + chunk
        self.add_xorb(xorb, bytes(packed))
        self.files[file] = [Run(xorb, len(data), 0, len(self.xorbs[xorb].chunks))]
        return file

    def read(self, file: str) -> bytes:
        import lz4.frame

        whole = bytearray()
        for run in self.files[file]:
            xorb = self.xorbs[run.xorb]
            for begin, end, _ in xorb.chunks[run.first : run.last]:
                scheme, chunk = xorb.data[begin + 4], xorb.data[begin + 8 : end]
                if scheme:
                    chunk = lz4.frame.decompress(chunk)
                whole += ungrouped(chunk) if scheme == 2 else chunk
        return bytes(whole)

    def reconstruction(self, file: str, asked: str, base: str) -> dict | None:
        """Where the bytes of a file lie, or None if the range begins after its end."""
        total = self.size(file)
        begin, end = 0, total
        if found := re.match(r"bytes=(\d+)-(\d*)", asked):
            begin = int(found[1])
            end = min(int(found[2]) + 1, total) if found[2] else total
            if begin >= total:
                return None
        terms, fetched, at, offset = [], {}, 0, None
        for run in self.files[file]:
            wanted, length, chunks = [], 0, self.xorbs[run.xorb].chunks
            for number in range(run.first, run.last):
                unpacked = chunks[number][2]
                if at + unpacked > begin and at < end:
                    offset = begin - at if offset is None else offset
                    wanted.append(number)
                    length += unpacked
                at += unpacked
            if wanted:
                span = {"start": wanted[0], "end": wanted[-1] + 1}
                terms.append({"hash": run.xorb, "range": span, "unpacked_length": length})
                bytes_range = {"start": chunks[wanted[0]][0], "end": chunks[wanted[-1]][1] - 1}
                source = {"range": span, "url": f"{base}/xorb-data/{run.xorb}", "url_range": bytes_range}
                if source not in fetched.setdefault(run.xorb, []):
                    fetched[run.xorb].append(source)
        return {"offset_into_first_range": offset or 0, "terms": terms, "fetch_info": fetched}


def text_of(name: bytes) -> str:
    """How hf-xet writes a hash: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", name))


def ungrouped(chunk: bytes) -> bytes:
    """Undo the packing that puts every fourth byte together."""
    whole, at = bytearray(len(chunk)), 0
    for lane in range(4):
        length = len(whole[lane::4])
        whole[lane::4] = chunk[at : at + length]
        at += length
    return bytes(whole)
