"""Absolute patches: what one version sets, as an ordinary part file with `coo` and `dense` slices only.

They are the redo log of the working copy and what engines of this host write into their live parameters. How many
elements each slice sets is known before anything is decoded, so the file is laid out first and filled from any number
of threads; memory is that of the frames being decoded, however large the version.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from torch_delta.codec.bits import Bits, Index, as_bytes, bits_dtype
from torch_delta.format.digest import ZERO, Digest
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.encodings import PAYLOAD_DTYPES, coo_index_name
from torch_delta.format.frames import Frame, Slice
from torch_delta.format.part import PartHeader, encode_part, parse_part, payload_sizes
from torch_delta.receive.diskio import local_io

if TYPE_CHECKING:
    from pathlib import Path

    from torch_delta.codec.change import Change
    from torch_delta.format.box import Box
    from torch_delta.format.schema import Schema

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # address space only, no promise of memory
_HASH_BLOCK_BYTES = 8 << 20
_MOST_VIEWS = 1024  # of one call, on every Linux


class PatchSlice(NamedTuple):
    """New bits of one box of a tensor.

    Attributes:
        box: in full-tensor coordinates.
        positions: row-major inside the box, strictly increasing, uint32 or uint64; None for the whole box.
        value: unsigned bits, `[len(positions)]` or `[box.numel]`.
    """

    box: Box
    positions: Index | None
    value: Bits


class Patch(Mapping[int, tuple[PatchSlice, ...]]):
    """An open patch: schema index of a tensor to its slices. Arrays are views of the mapped file and keep it alive.

    Attributes:
        since: version it leads from; the one before `version` unless several were merged.
        version: it leads to.
        num_changed: elements it sets.
        increments: by tensor, what the patch adds to its digest; proved when the patch was made. Whoever writes the
            patch somewhere else can prove with them what was there before and what is there now.
    """

    def __init__(
        self,
        version: int,
        num_changed: int,
        slices: Mapping[int, tuple[PatchSlice, ...]],
        increments: Mapping[int, Digest],
        *,
        since: int | None = None,
    ) -> None:
        self.increments = increments
        self.since = version - 1 if since is None else since
        self.version = version
        self.num_changed = num_changed
        self._slices = slices

    def __getitem__(self, tensor: int) -> tuple[PatchSlice, ...]:
        return self._slices[tensor]

    def __iter__(self) -> Iterator[int]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        return f"Patch(since={self.since}, version={self.version}, num_changed={self.num_changed}, tensors={len(self)})"


class _Slot(NamedTuple):
    """Where one slice goes in the file."""

    index_at: int
    index_dtype: np.dtype[Any] | None
    value_at: int
    value_bytes: int


class PatchWriter:
    """Writes a patch whose slices arrive in any order, from any threads.

    Args:
        path: new file.
        schema: of the stream.
        stream_id: of the stream.
        version: the patch leads to.
        frames: of all parts of the version, checked; their slices are what `put` will be called for.

    Raises:
        FormatError: more slices than one part file may hold.
        StoreUnavailable: no room or no permission.
    """

    def __init__(self, path: Path, schema: Schema, stream_id: str, version: int, frames: Iterable[Frame]) -> None:
        self.path = path
        self._slots: dict[tuple[int, Box], _Slot] = {}
        absolute = _absolute_frames(frames)
        header = PartHeader(stream_id=stream_id, version=version, rank=0, seq=0)
        with local_io(path, f"write the patch of version {version}"):
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                self._lay_out(header, absolute, schema)
            except BaseException:
                self.discard()
                raise

    def _lay_out(self, header: PartHeader, frames: Sequence[Frame], schema: Schema) -> None:
        """Write everything but the payload, and note where each slice's payload goes."""
        sizes = [payload_sizes(frame, schema) for frame in frames]
        total = sum(sum(named.values()) for named in sizes)
        # Address space of the right size stands in for the payload: never touched, so it costs no memory.
        names: dict[int, str] = {}
        payloads: list[dict[str, memoryview]] = []
        for named in sizes:
            payload = {}
            for name, size in named.items():
                stand_in = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
                names[id(stand_in)] = name
                payload[name] = memoryview(stand_in)
            payloads.append(payload)
        ends: dict[str, int] = {}
        at = 0
        for chunk in encode_part(header, frames, payloads, schema=schema):
            stands_for = names.get(id(chunk.obj)) if isinstance(chunk, memoryview) else None
            if stands_for is None:
                self._write([memoryview(chunk)], at)
            else:
                ends.setdefault(stands_for, at)
            at += len(chunk)
        assert self._fd is not None
        if total:
            os.posix_fallocate(self._fd, 0, at)  # no room: say so now, not after minutes of decoding
        for frame in frames:
            for item in frame.slices:
                self._slots[item.tensor, item.box] = _slot(frame.encoding, item, schema, ends)

    def put(self, tensor: int, box: Box, index: Index | None, value: Bits) -> None:
        """Write the bits of one slice; `index` may be None where they are those of the whole box."""
        for at, data in self._pieces(tensor, box, index, value):
            self._write([data], at)

    def put_all(self, changes: Iterable[Change]) -> None:
        """The same for several changes; what lies side by side in the file is written in one go."""
        pieces = [
            piece for change in changes for piece in self._pieces(change.tensor, change.box, change.index, change.new)
        ]
        start, end = 0, -1
        run: list[memoryview] = []
        for at, data in sorted(pieces, key=itemgetter(0)):
            if at != end:
                self._write(run, start)
                run, start = [], at
            run.append(data)
            end = at + len(data)
        self._write(run, start)

    def _pieces(self, tensor: int, box: Box, index: Index | None, value: Bits) -> Iterator[tuple[int, memoryview]]:
        """Bytes of a slice, each with their place in the file."""
        slot = self._slots[tensor, box]
        assert value.nbytes == slot.value_bytes, "decoded to another number of elements"
        if slot.index_dtype is not None:
            if index is None:
                index = np.arange(box.numel, dtype=slot.index_dtype)
            yield slot.index_at, as_bytes(index.astype(slot.index_dtype, copy=False))
        yield slot.value_at, as_bytes(value)

    def _write(self, views: list[memoryview], at: int) -> None:
        """Write views one after the other; takes them out of the list."""
        assert self._fd is not None
        while views:
            with local_io(self.path, "write a patch"):
                written = os.pwritev(self._fd, views[:_MOST_VIEWS], at)
            at += written
            num_whole = 0
            while num_whole < len(views) and len(views[num_whole]) <= written:
                written -= len(views[num_whole])
                num_whole += 1
            del views[:num_whole]
            if written:
                views[0] = views[0][written:]

    def close(self) -> None:
        """The file is complete; the caller syncs it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def discard(self) -> None:
        """Remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)


def _absolute_frames(frames: Iterable[Frame]) -> list[Frame]:
    """One `coo` and one `dense` frame with the slices of all `frames`, in the order a part asks for."""
    kinds: dict[str, list[Slice]] = {"coo": [], "dense": []}
    for frame in frames:
        kinds["dense" if frame.encoding == "dense" else "coo"].extend(frame.slices)
    return [
        Frame(kind, tuple(sorted(slices, key=lambda item: (item.tensor, item.box.offset))))
        for kind, slices in kinds.items()
        if slices
    ]


def _slot(encoding: str, item: Slice, schema: Schema, ends: dict[str, int]) -> _Slot:
    """The next free place of each payload tensor that the slice uses; moves `ends` past it."""
    dtype = schema.tensors[item.tensor].dtype
    value_bytes = item.count * ITEMSIZE[dtype]
    if encoding == "dense":
        return _Slot(0, None, _take(ends, f"dense.{dtype}", value_bytes), value_bytes)
    index = coo_index_name(item.box.numel)
    index_kind = bits_dtype(PAYLOAD_DTYPES[index])
    index_at = _take(ends, index, item.count * index_kind.itemsize)
    return _Slot(index_at, index_kind, _take(ends, f"coo.value.{dtype}", value_bytes), value_bytes)


def _take(ends: dict[str, int], name: str, size: int) -> int:
    at = ends[name]
    ends[name] = at + size
    return at


def open_patch(path: Path, schema: Schema, *, since: int | None = None) -> Patch:
    """Map a patch and check everything it declares.

    Args:
        path: of the file.
        schema: of the stream.
        since: version it leads from; None for the one before.

    Raises:
        FormatError: damaged.
        FileNotFoundError: there is none.
    """
    with path.open("rb") as stream:
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    part = parse_part(memoryview(buffer), schema=schema, key=path.name)
    found: dict[int, list[PatchSlice]] = {}
    increments: dict[int, Digest] = {}
    for frame in part.frames:
        payload = part.payload(frame)
        used = dict.fromkeys(payload, 0)
        for item in frame.slices:
            dtype = schema.tensors[item.tensor].dtype
            index = None
            if frame.encoding == "coo":
                name = coo_index_name(item.box.numel)
                index = _array(payload, used, name, bits_dtype(PAYLOAD_DTYPES[name]), item.count)
            kind = "coo.value" if frame.encoding == "coo" else "dense"
            value = _array(payload, used, f"{kind}.{dtype}", bits_dtype(dtype), item.count)
            found.setdefault(item.tensor, []).append(PatchSlice(item.box, index, value))
            increments[item.tensor] = increments.get(item.tensor, ZERO) + item.increment
    slices = {tensor: tuple(of_tensor) for tensor, of_tensor in sorted(found.items())}
    return Patch(part.header.version, part.num_changed, slices, increments, since=since)


def _array(payload: Mapping[str, memoryview], used: dict[str, int], name: str, dtype: np.dtype[Any], count: int) -> Any:
    array = np.frombuffer(payload[name], dtype, count, used[name])
    used[name] += array.nbytes
    return array


def file_hash(path: Path) -> str:
    """xxh3-128 of a file of this host, in hex: finds what a crash or a bad disk did to it, at memory speed."""
    state = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BLOCK_BYTES):
            state.update(block)
    return str(state.hexdigest())
