"""`xor`: the bytes of `old ^ new` of whole boxes under zstd. Relative: it needs the very old bits the writer had.

    frame  :=  base check (16 bytes)  |  one zstd frame over the xor bytes of all boxes, in order

The base check is the digest of the old bits of the changed elements, summed over the slices. Digest increments cannot
do its job: where the old bits here and the writer's differ in bits the delta leaves alone, `new - old` is the same on
both sides. With the check, a wrong bit in any changed element is seen before anything is written.

Small slices share a zstd frame, so that its entropy tables pay off. Each stretch of `_STRETCH_BYTES` is flushed on its
own, which is how a slice's share is measured; a flush costs about 20 bytes, too many for every tiny slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zstandard

from torch_delta.codec.bits import bits_dtype, gather, index_dtype
from torch_delta.codec.change import Change
from torch_delta.codec.diff import nonzero
from torch_delta.codec.digest import digest_delta
from torch_delta.codec.encodings.base import Packed
from torch_delta.codec.zstd import Inflater, compressor
from torch_delta.errors import DigestMismatch
from torch_delta.format.checks import broken
from torch_delta.format.digest import DIGEST_BYTES, ZERO, Digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from torch_delta.codec.bits import Bits, Index
    from torch_delta.codec.encodings.base import OldRegion
    from torch_delta.format.frames import Frame, Slice
    from torch_delta.format.schema import Schema, TensorSpec

_WINDOW_BYTES = 8 << 20  # of xor bytes in memory at once, both ways; at least one element
_STRETCH_BYTES = 256 << 10
_SAMPLE_BYTES = 64 << 10
_ZSTD_BLOCK_BYTES = 128 << 10
_ZSTD_FEWEST_BLOCK_BYTES = 4  # a block of one repeated byte


class Xor:
    """Compressed layout; frames of several slices hold at most `MAX_FRAME_RAW_BYTES` of boxes."""

    name = "xor"
    is_absolute = False

    def fewest_bytes(self, schema: Schema, change: Change) -> int | None:  # noqa: ARG002  part of the interface
        """What zstd needs for boxes of this size at least; None without old bits."""
        if change.old is None:
            return None
        return change.box.numel * change.new.itemsize // _ZSTD_BLOCK_BYTES * _ZSTD_FEWEST_BLOCK_BYTES

    def estimated_bytes(self, change: Change, *, level: int) -> int | None:
        """From the xor bytes of the first `_SAMPLE_BYTES` of a box of which a quarter or more changed."""
        numel = change.box.numel
        if change.old is None or 4 * change.count < numel:
            return None
        num_sampled = min(numel, _SAMPLE_BYTES // change.new.itemsize)
        end = int(np.searchsorted(change.positions(), num_sampled))
        sample = np.zeros(num_sampled, change.new.dtype)
        sample[change.positions()[:end]] = change.old[:end] ^ change.new[:end]
        return len(compressor(level).compress(sample)) * numel // num_sampled

    def pack(self, schema: Schema, changes: Sequence[Change], *, level: int) -> Packed:
        """Compress window by window: memory is one window and the compressed bytes."""
        boxes = [change.box.numel * change.new.itemsize for change in changes]
        raw_bytes = sum(boxes)
        stream = compressor(level).compressobj(size=raw_bytes)
        scratch = np.zeros(min(raw_bytes, _WINDOW_BYTES), np.uint8)
        check = ZERO
        pieces: list[bytes] = []
        measured: list[int] = []
        stretch: list[int] = []  # changed elements of each slice since the last flush
        stored = since_flush = 0
        for at, change in enumerate(changes):
            assert change.old is not None
            check += digest_delta(change.flat_index(schema), np.zeros_like(change.old), change.old)
            pieces += map(stream.compress, _windows(change, scratch))
            since_flush += boxes[at]
            stretch.append(change.count)
            is_last = at == len(changes) - 1
            if is_last or since_flush >= _STRETCH_BYTES:
                pieces.append(stream.flush(*(() if is_last else (zstandard.COMPRESSOBJ_FLUSH_BLOCK,))))
                size = sum(map(len, pieces)) - stored
                stored += size
                measured += [-(-size * count // sum(stretch)) for count in stretch]
                stretch, since_flush = [], 0
        blob = b"".join((check.to_bytes(), *pieces))
        return Packed(payload={self.name: blob}, stored_bytes=len(blob), raw_bytes=raw_bytes, measured=tuple(measured))

    def unpack(
        self, schema: Schema, frame: Frame, payload: Mapping[str, memoryview], old: OldRegion, *, key: str
    ) -> Iterator[Change]:
        """Arrays are the changes' own; nothing is changed in place."""
        blob = payload[self.name]
        if len(blob) <= DIGEST_BYTES:
            raise broken("E3", key, f"an xor frame begins with {DIGEST_BYTES} bytes of base check, got {len(blob)}")
        inflater = Inflater(blob[DIGEST_BYTES:], key=key)
        scratch = np.empty(min(frame.raw_bytes, _WINDOW_BYTES), np.uint8)
        check = ZERO
        for item in frame.slices:
            index, flips = _flips(inflater, scratch, item, schema.tensors[item.tensor], key)
            before = gather(old(item), index)
            change = Change(
                tensor=item.tensor,
                box=item.box,
                index=index,
                old=before,
                new=np.bitwise_xor(before, flips),
                increment=item.increment,
            )
            check += digest_delta(change.flat_index(schema), np.zeros_like(before), before)
            yield change
        inflater.finish()
        expected = Digest.from_bytes(bytes(blob[:DIGEST_BYTES]))
        if check != expected:
            names = [schema.tensors[item.tensor].name for item in frame.slices]
            raise DigestMismatch(
                f"{key}: the old bits of {names[0]!r}{f' or {len(names) - 1} more tensors' if names[1:] else ''} here "
                f"are not the ones the delta was made from (base check {check}, expected {expected}); nothing was "
                "written. Start again from an anchor or a fresh copy of the base (rule E6)",
                tensor=names[0],
                tensors=names,
                key=key,
                expected=expected.hex(),
                got=check.hex(),
            )


def _windows(change: Change, scratch: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
    """The xor bytes of a box, a window at a time; `scratch` is all zero before and after."""
    assert change.old is not None
    width = change.new.itemsize
    lane: Bits = scratch[: scratch.size - scratch.size % width].view(change.new.dtype)
    index, flips = change.positions(), np.bitwise_xor(change.old, change.new)
    numel, step = change.box.numel, lane.size
    cuts = np.searchsorted(index, range(step, numel, step)).tolist() if numel > step else []
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, index.size], strict=True)):
        start = number * step
        here = index[begin:end].astype(np.intp)  # numpy casts other types in small buffers, at half the speed
        here -= start
        lane[here] = flips[begin:end]
        yield scratch[: min(numel - start, step) * width].data
        lane[here] = 0


def _flips(
    inflater: Inflater, scratch: npt.NDArray[np.uint8], item: Slice, spec: TensorSpec, key: str
) -> tuple[Index, Bits]:
    """Index and xor bits of the elements of a slice that change (rule E4)."""
    dtype = bits_dtype(spec.dtype)
    lane: Bits = scratch[: scratch.size - scratch.size % dtype.itemsize].view(dtype)
    numel, found = item.box.numel, 0
    indices: list[Index] = []
    flips: list[Bits] = []
    for start in range(0, numel, lane.size):
        window = lane[: min(lane.size, numel - start)]
        inflater.fill(window)
        here = nonzero(window)
        found += here.size
        if found > item.count:
            break
        flips.append(window[here])
        moved = here.astype(index_dtype(numel))
        moved += moved.dtype.type(start)
        indices.append(moved)
    if found != item.count:
        raise broken(
            "E4",
            key,
            f"{'more than ' * (found > item.count)}{min(found, item.count)} elements of {spec.name!r} change, not the "
            f"{item.count} of the table",
            tensor=spec.name,
            expected=item.count,
            got=found,
        )
    return np.concatenate(indices), np.concatenate(flips)
