"""Changes of one sender to the frames and payloads of a part: per slice the smallest encoding, by measured size (F30).

Encodings of fixed layout have exact sizes; `packed` and `xor` are compressed first and judged by what it took. A slice
that another encoding holds in fewer bytes leaves its frame, which is then packed again without it. `packed` goes first;
where a large share of a box changed, a sample under `xor` tells whether that one is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch_delta.codec.cutting import cut_change
from torch_delta.codec.encodings import REGISTRY
from torch_delta.codec.spreading import spread
from torch_delta.format.encodings import ENCODINGS
from torch_delta.format.frames import Frame, Slice
from torch_delta.format.limits import MAX_FRAME_RAW_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from torch_delta.codec.change import Change
    from torch_delta.codec.encodings.base import Encoding, Packed, Payload
    from torch_delta.format.schema import Schema


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPart:
    """What `torch_delta.format.part.encode_part` lays out; frames and payloads belong together one to one.

    Attributes:
        frames: of the part.
        payloads: bytes of each frame by payload tensor name; may be views of the changes' arrays.
    """

    frames: tuple[Frame, ...]
    payloads: tuple[Payload, ...]


class _Choice(NamedTuple):
    """A change, and the smallest encoding of fixed layout that can carry it.

    Attributes:
        change: to be carried.
        fixed: name of the encoding; None if none can.
        fixed_bytes: what it takes.
        rival_bytes: what a compressed encoding that is tried later would take, about; None if none is worth trying.
    """

    change: Change
    fixed: str | None
    fixed_bytes: int
    rival_bytes: int | None = None

    def is_beaten_by(self, size_bytes: int) -> bool:
        """Whether that many bytes are fewer than any other encoding takes."""
        return (self.fixed is None or size_bytes < self.fixed_bytes) and (
            self.rival_bytes is None or size_bytes <= self.rival_bytes
        )


def encode_changes(
    schema: Schema,
    changes: Iterable[Change],
    *,
    level: int = 1,
    absolute_only: bool = False,
    encodings: Sequence[str] = tuple(REGISTRY),
    pool: Executor | None = None,
) -> EncodedPart:
    """Encode what one sender has to say about one version, or a part of it.

    Thread-safe; the heavy loops release the GIL. Extra memory: a few windows of 8 MiB and the encoded bytes. Changes
    that set nothing are left out.

    Args:
        schema: of the stream.
        changes: in any order; the boxes of one tensor are disjoint.
        level: of zstd, 1 to 19.
        absolute_only: use no encoding that needs old bits to be decoded.
        encodings: names the writer may pick from.
        pool: encodes frames in its threads; not the pool this call runs in. The result is the same without.

    Raises:
        ValueError: a change contradicts the schema or itself, or none of the allowed encodings can carry it (names the
            tensor); an encoding is unknown.
    """
    allowed = [_known(name) for name in encodings]
    fixed = [entry for entry in allowed if entry.is_absolute]
    relative = [] if absolute_only else [entry for entry in allowed if not entry.is_absolute]
    cut = any(entry.name == "packed" for entry in relative)
    waiting = [_smallest_fixed(schema, change, fixed) for change in _prepared(schema, changes, pool, cut=cut)]
    frames: list[tuple[Frame, Payload]] = []
    for number, entry in enumerate(relative):
        rivals = relative[number + 1 :]
        waiting = _with_rivals(waiting, rivals, level, pool)
        waiting = _encode_measured(schema, waiting, entry, level, frames=frames, pool=pool)
    for entry in fixed:
        mine = [choice for choice in waiting if choice.fixed == entry.name]
        for group in _groups(mine, lambda choice: choice.fixed_bytes):
            carried = [choice.change for choice in group]
            frames.append(_framed(entry, carried, entry.pack(schema, carried, level=level)))
    if stuck := [choice.change for choice in waiting if choice.fixed is None]:
        raise ValueError(
            f"change of {schema.tensors[stuck[0].tensor].name}: none of {', '.join(encodings) or 'no encodings'} can "
            f"carry it (old bits {'not known' if stuck[0].old is None else 'known'}, {absolute_only=})"
        )
    return EncodedPart(frames=tuple(frame for frame, _ in frames), payloads=tuple(payload for _, payload in frames))


def _known(name: str) -> Encoding:
    if name not in REGISTRY:
        raise ValueError(f"unknown encoding {name!r}; known: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def _prepared(schema: Schema, changes: Iterable[Change], pool: Executor | None, *, cut: bool) -> Iterator[Change]:
    """Checked, in the order of frames, each with its increment."""

    def prepare(change: Change) -> Change:
        is_complete = change.increment is not None or not change.count
        return change if is_complete else change.with_digests(schema)

    ordered = sorted(changes, key=lambda change: (change.tensor, change.box.offset))
    for change in ordered:
        change.check(schema)
    if cut:
        ordered = [piece for change in ordered for piece in cut_change(change)]
    costs = [change.count if change.increment is None else 0 for change in ordered]
    return (change for change in spread(pool, prepare, ordered, costs) if change.count)


def _smallest_fixed(schema: Schema, change: Change, fixed: Sequence[Encoding]) -> _Choice:
    sizes = [(size, entry.name) for entry in fixed if (size := entry.fewest_bytes(schema, change)) is not None]
    if not sizes:
        return _Choice(change, None, 0)
    size, name = min(sizes)
    return _Choice(change, name, size)


def _with_rivals(
    waiting: Sequence[_Choice], rivals: Sequence[Encoding], level: int, pool: Executor | None
) -> list[_Choice]:
    """Estimate what the encodings that come later would take."""
    if not rivals:
        return [choice._replace(rival_bytes=None) for choice in waiting]

    def estimate(choice: _Choice) -> _Choice:
        sizes = [size for rival in rivals if (size := rival.estimated_bytes(choice.change, level=level)) is not None]
        return choice._replace(rival_bytes=min(sizes, default=None))

    return list(spread(pool, estimate, waiting, [choice.change.count for choice in waiting]))


def _encode_measured(
    schema: Schema,
    waiting: Sequence[_Choice],
    entry: Encoding,
    level: int,
    *,
    frames: list[tuple[Frame, Payload]],
    pool: Executor | None,
) -> list[_Choice]:
    """Encode what a compressed encoding holds in the fewest bytes; return the choices it does not."""
    mine: list[_Choice] = []
    others: list[_Choice] = []
    for choice in waiting:
        fewest = entry.fewest_bytes(schema, choice.change)
        promising = fewest is not None and (choice.fixed is None or fewest < choice.fixed_bytes)
        (mine if promising else others).append(choice)

    def encode(group: list[_Choice]) -> tuple[tuple[Frame, Payload] | None, list[_Choice]]:
        return _encode_group(schema, group, entry, level)

    groups = list(_groups(mine, lambda choice: choice.change.box.numel * choice.change.new.itemsize))
    costs = [sum(choice.change.count for choice in group) for group in groups]
    for frame, lost in spread(pool, encode, groups, costs):
        others += lost
        if frame is not None:
            frames.append(frame)
    return sorted(others, key=lambda choice: (choice.change.tensor, choice.change.box.offset))


def _encode_group(
    schema: Schema, group: Sequence[_Choice], entry: Encoding, level: int
) -> tuple[tuple[Frame, Payload] | None, list[_Choice]]:
    """One frame of what `entry` holds in the fewest bytes, if anything, and the choices it does not."""
    packed = entry.pack(schema, [choice.change for choice in group], level=level)
    kept: list[_Choice] = []
    others: list[_Choice] = []
    for choice, size in zip(group, packed.measured, strict=True):
        (kept if choice.is_beaten_by(size) else others).append(choice)
    if 0 < len(kept) < len(group):
        packed = entry.pack(schema, [choice.change for choice in kept], level=level)
    # The frame itself costs something too, which no slice was charged for.
    if all(choice.fixed is not None for choice in kept) and packed.stored_bytes >= sum(
        choice.fixed_bytes for choice in kept
    ):
        return None, [*others, *kept]
    return _framed(entry, [choice.change for choice in kept], packed), others


def _groups(items: Iterable[_Item], size_bytes: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Consecutive items of at most `MAX_FRAME_RAW_BYTES` together, or one larger item alone."""
    group: list[_Item] = []
    filled = 0
    for item in items:
        size = size_bytes(item)
        if group and filled + size > MAX_FRAME_RAW_BYTES:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group


def _framed(entry: Encoding, changes: Sequence[Change], packed: Packed) -> tuple[Frame, Payload]:
    slices = []
    for change in changes:
        assert change.increment is not None
        # A dense slice also sets the elements that did not change; they add nothing to the increment.
        count = change.count if ENCODINGS[entry.name].counted else change.box.numel
        slices.append(Slice(change.tensor, change.box, count, change.increment))
    return Frame(entry.name, tuple(slices), packed.stored_bytes, packed.raw_bytes), packed.payload
