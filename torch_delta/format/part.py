"""Parts: one sender's slices for one version, in a file that any safetensors reader opens.

header ── __metadata__: which stream, version, sender
increment     U64 [num_slices, 2]   ┐ parsed and checked in full before any payload is touched
table         U8  [..]              ┘
coo.index.u32, coo.value.BF16, dense.F32, xor, ...   payload, concatenated over the frames in order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.format.checks import Fields, broken, need_hex, need_range
from torch_delta.format.container import read_header, write_header
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.encodings import ENCODINGS, INCREMENT, PAYLOAD_DTYPES, TABLE, coo_index_name
from torch_delta.format.frames import Frame, Slice, check_slices_disjoint
from torch_delta.format.keys import parse_part_key
from torch_delta.format.limits import FORMAT_VERSION, MAX_INT, MAX_RANK, MAX_SEQ
from torch_delta.format.table import decode_table, encode_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_delta.format.commit import Commit, PartRef
    from torch_delta.format.schema import Schema

__all__ = [
    "Frame",
    "Part",
    "PartHeader",
    "Slice",
    "encode_part",
    "parse_part",
    "payload_sizes",
]

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHeader:
    """Whose part it is.

    Attributes:
        stream_id: of the stream.
        version: which version it belongs to, 1 or more.
        rank: of the sender.
        seq: number of the part among those of this sender and version.
    """

    stream_id: str
    version: int
    rank: int
    seq: int

    def check(self, *, key: str) -> None:
        """Refuse values outside their range.

        Raises:
            FormatError: rule P4 is broken.
        """
        need_hex(self.stream_id, 32, rule="P4", key=key, what="stream_id")
        need_range(self.version, 1, MAX_INT, rule="P4", key=key, what="version")
        need_range(self.rank, 0, MAX_RANK, rule="P4", key=key, what="rank")
        need_range(self.seq, 0, MAX_SEQ, rule="P4", key=key, what="seq")


def payload_sizes(frame: Frame, schema: Schema) -> dict[str, int]:
    """Bytes a frame occupies in each payload tensor, in the order in which its slices first use them."""
    sizes: dict[str, int] = {}
    if ENCODINGS[frame.encoding].blob:
        return {frame.encoding: frame.stored_bytes}
    for item in frame.slices:
        dtype = schema.tensors[item.tensor].dtype
        if frame.encoding == "coo":
            index = coo_index_name(item.box.numel)
            sizes[index] = sizes.get(index, 0) + item.count * ITEMSIZE[PAYLOAD_DTYPES[index]]
        name = f"{'coo.value' if frame.encoding == 'coo' else frame.encoding}.{dtype}"
        sizes[name] = sizes.get(name, 0) + item.count * ITEMSIZE[dtype]
    return sizes


def encode_part(
    header: PartHeader,
    frames: Sequence[Frame],
    payloads: Sequence[Mapping[str, BytesLike]],
    *,
    schema: Schema,
) -> list[BytesLike]:
    """Lay out a part without copying its payload.

    Args:
        header: whose part it is.
        frames: in the order of the payload.
        payloads: for each frame, by payload tensor name, the bytes of all its slices in order (contiguous buffers).
        schema: of the stream.

    Returns:
        The stored bytes, in pieces to be written one after the other; the payload pieces are those passed in.

    Raises:
        FormatError: frames break a rule, or a payload has another size than its frame says.
    """
    key = f"part of rank {header.rank}, version {header.version}"
    header.check(key=key)
    table, increment = encode_table(frames, schema=schema, key=key)
    check_slices_disjoint([frames], schema=schema)
    pieces: dict[str, list[memoryview]] = {}
    for at, (frame, payload) in enumerate(zip(frames, payloads, strict=True)):
        expected = payload_sizes(frame, schema)
        views = {name: memoryview(data).cast("B") for name, data in payload.items()}
        found = {name: len(view) for name, view in views.items()}
        if found != expected:
            raise broken("P3", key, f"frame {at} ({frame.encoding}) needs payload bytes {expected}, got {found}")
        for name, view in views.items():
            pieces.setdefault(name, []).append(view)
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        (INCREMENT, "U64", (len(increment) // 16, 2)),
        (TABLE, "U8", (len(table),)),
    ]
    for name, views_of in pieces.items():
        dtype = PAYLOAD_DTYPES[name]
        tensors.append((name, dtype, (sum(len(view) for view in views_of) // ITEMSIZE[dtype],)))
    tensors.sort(key=lambda entry: (-ITEMSIZE[entry[1]], entry[0]))
    metadata = {
        "format_version": list(FORMAT_VERSION),
        "stream_id": header.stream_id,
        "version": header.version,
        "rank": header.rank,
        "seq": header.seq,
    }
    chunks: list[BytesLike] = [write_header(metadata, tensors)]
    for name, _, _ in tensors:
        if name == TABLE:
            chunks.append(table)
        elif name == INCREMENT:
            chunks.append(increment)
        else:
            chunks += pieces[name]
    return [chunk for chunk in chunks if len(chunk)]


class Part:
    """A parsed part, fully checked but for the contents of its payload. Made by `parse_part`.

    Attributes:
        key: where it was found.
        header: whose part it is.
        frames: in the order of the payload.
    """

    __slots__ = ("_payloads", "frames", "header", "key")

    def __init__(
        self,
        key: str,
        header: PartHeader,
        frames: tuple[Frame, ...],
        payloads: Mapping[Frame, dict[str, memoryview]],
    ) -> None:
        self.key = key
        self.header = header
        self.frames = frames
        self._payloads = payloads

    @property
    def slices(self) -> Iterable[Slice]:
        """All slices of all frames."""
        return (item for frame in self.frames for item in frame.slices)

    @property
    def num_slices(self) -> int:
        """Slices of all frames."""
        return sum(len(frame.slices) for frame in self.frames)

    @property
    def num_changed(self) -> int:
        """Elements set by all slices."""
        return sum(item.count for item in self.slices)

    def payload(self, frame: Frame) -> dict[str, memoryview]:
        """The bytes of one frame by payload tensor name: views into the buffer that was parsed, never copies.

        Raises:
            KeyError: the frame is not of this part.
        """
        return dict(self._payloads[frame])

    def check_reference(self, ref: PartRef, commit: Commit) -> None:
        """Check that this is the part a commit names (rule P13), beyond the sha256 of its bytes.

        Raises:
            FormatError: another stream, version, rank or seq, or other counts.
        """
        name = parse_part_key(ref.key)
        expected = (commit.stream_id, commit.version, ref.rank, name.seq, ref.num_slices, ref.num_changed)
        head = self.header
        got = (head.stream_id, head.version, head.rank, head.seq, self.num_slices, self.num_changed)
        if got != expected:
            raise broken(
                "P13",
                ref.key,
                f"(stream, version, rank, seq, slices, changed) is {got}, {commit.key} says {expected}",
                expected=expected,
                got=got,
            )


def parse_part(buffer: BytesLike, *, schema: Schema, key: str) -> Part:
    """Parse a part and check everything it declares before any payload is used.

    Memory and time are bounded by the size of `buffer` and the limits of the format, not by declared sizes.

    Args:
        buffer: the stored bytes (an mmap's memoryview is fine); it must outlive the part.
        schema: of the stream.
        key: where it was found, for messages.

    Raises:
        FormatError: one of rules P1 to P12 is broken.
        UnsupportedFormat: another major version, or an encoding of a later release.
    """
    fields, tensors = read_header(memoryview(buffer).cast("B"), key=key)
    header = _part_header(fields, key)
    tables: list[memoryview] = []
    for name, dtype in ((TABLE, "U8"), (INCREMENT, "U64")):
        found, data = tensors.pop(name, ("nothing", memoryview(b"")))
        if found != dtype:
            raise broken("P3", key, f"tensor {name!r} must be {dtype}, got {found}")
        tables.append(data)
    frames = decode_table(*tables, schema=schema, key=key)
    check_slices_disjoint([frames], schema=schema)
    payloads: dict[Frame, dict[str, memoryview]] = {}
    ends = dict.fromkeys(tensors, 0)
    for at, frame in enumerate(frames):
        views = payloads[frame] = {}
        for name, size in payload_sizes(frame, schema).items():
            dtype, data = tensors.get(name, ("nothing", memoryview(b"")))
            begin = ends.get(name, 0)
            if dtype != PAYLOAD_DTYPES[name] or begin + size > len(data):
                raise broken("P3", key, f"frame {at} needs bytes {begin} to {begin + size} of {name!r}, got {dtype}")
            views[name] = data[begin : begin + size]
            ends[name] = begin + size
    for name, end in ends.items():
        if end != len(tensors[name][1]) or not end:
            raise broken("P3", key, f"tensor {name!r} has {len(tensors[name][1])} bytes, the frames use {end}")
    return Part(key, header, frames, payloads)


def _part_header(fields: Fields, key: str) -> PartHeader:
    fields.format_version()
    header = PartHeader(
        stream_id=fields.text("stream_id"),
        version=fields.integer("version"),
        rank=fields.integer("rank"),
        seq=fields.integer("seq"),
    )
    header.check(key=key)
    return header
