"""What the difference of two checkpoints costs in every encoding, measured by encoding and decoding it.

    boxes of both ──diff──▶ changes ──▶ a part at a time: encode, lay out, decode with each encoding ──▶ bytes, s

Everything is done as a publisher and a follower do it, on one thread, with the proof of every slice; reading the files
is not counted. Memory: four boxes, the changes of one part and its encodings, whatever the size of the checkpoints.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from torch_delta.cli.bound import TensorBound
from torch_delta.codec import encode_changes
from torch_delta.codec.bits import gather
from torch_delta.codec.change import Change
from torch_delta.codec.compiling import compiling_s
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.diff import diff
from torch_delta.codec.packed.reduced import reduce_change
from torch_delta.format.part import PartHeader, encode_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.cli.pairs import Pair
    from torch_delta.codec.bits import Bits
    from torch_delta.format.box import Box

ENCODINGS: Final = ("coo", "xor", "packed")
_PART_BYTES: Final = 32 << 20
"""Of positions, old and new bits, after which a part is encoded."""

_KINDS: Final = (
    ("embedding", ("embed", "wte", "wpe")),
    ("head", ("lm_head", "output_layer", "score")),
    ("norm", ("norm", "ln_", "ln1", "ln2")),
    ("router", ("router", "mlp.gate.", "block_sparse_moe.gate.")),
    ("experts", ("expert",)),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj")),
    ("mlp", ("mlp", "ffn", "feed_forward", "gate_proj", "up_proj", "down_proj", "fc1", "fc2", "dense")),
)


def kind_of(name: str) -> str:
    """What kind of tensor a checkpoint name stands for, as these names are usually formed."""
    if name.endswith(".bias"):
        return "bias"
    return next((kind for kind, words in _KINDS if any(word in name.lower() for word in words)), "other")


@dataclass(slots=True)
class Kind:
    """Counts of one kind of tensor."""

    kind: str
    num_tensors: int = 0
    elements: int = 0
    changed: int = 0


@dataclass(slots=True)
class Cost:
    """Of one encoding: stored bytes with all tables, and seconds of one thread."""

    bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class Estimate:
    """What `estimate` found.

    Attributes:
        total_elements: of the checkpoint, ties as often as the files hold them.
        changed_elements: whose bits differ.
        full_bytes: of a full copy.
        bound_bits: see `torch_delta.cli.bound`.
        compare_s: seconds of one thread for finding the changes.
        encodings: by name.
        kinds: by kind of tensor.
    """

    total_elements: int = 0
    changed_elements: int = 0
    full_bytes: int = 0
    bound_bits: float = 0.0
    compare_s: float = 0.0
    encodings: dict[str, Cost] = field(default_factory=lambda: {name: Cost() for name in ENCODINGS})
    kinds: dict[str, Kind] = field(default_factory=dict)


def estimate(pair: Pair, advance: Callable[[int], None] = lambda _: None) -> Estimate:
    """Compare, encode and decode, piece by piece.

    Args:
        pair: old and new.
        advance: told the bytes of every box of one side that is done.

    Raises:
        FormatError: a file changed while it was read.
        StoreUnavailable: it could not be read.
    """
    found = Estimate()
    part = _Part(pair, found)
    for tensor, spec in enumerate(pair.schema.tensors):
        kind = found.kinds.setdefault(kind_of(spec.name), Kind(kind_of(spec.name)))
        kind.num_tensors += 1
        bound = TensorBound(spec.dtype)
        for box in pair.boxes(tensor):
            old, new = (pair.read(folder, tensor, box) for folder in (pair.old, pair.new))
            started = _now()
            index = diff(old, new)
            found.compare_s += _now() - started
            bits = gather(new, index)
            bound.add(old.reshape(-1), index, bits)
            kind.elements += old.size
            kind.changed += index.size
            found.full_bytes += old.nbytes
            if index.size:
                change = Change(tensor=tensor, box=box, index=index, old=gather(old, index), new=bits)
                part.add(change.with_increment(change.computed_increment(pair.schema)), old)
            advance(old.nbytes)
        found.bound_bits += bound.bits() if kind.changed else 0.0
    part.flush()
    found.total_elements = sum(kind.elements for kind in found.kinds.values())
    found.changed_elements = sum(kind.changed for kind in found.kinds.values())
    return found


def _now() -> float:
    """Seconds on a clock that stands still while kernels are compiled: once per process, not per checkpoint."""
    return time.perf_counter() - compiling_s()


class _Part:
    """Changes on their way into one part."""

    def __init__(self, pair: Pair, found: Estimate) -> None:
        self._pair = pair
        self._found = found
        self._changes: list[Change] = []
        self._size_bytes = 0
        self._seq = 0

    def add(self, change: Change, region: Bits) -> None:
        """Take up a change; `region` are the old bits of its box."""
        spec = self._pair.schema.tensors[change.tensor]
        assert change.old is not None
        started = _now()
        reduced = reduce_change(spec.dtype, change.box, change.index, change.old, change.new, region)
        self._found.encodings["packed"].encode_s += _now() - started
        self._changes.append(replace(change, reduced=reduced))
        self._size_bytes += change.count * (4 + 2 * change.new.itemsize)
        if self._size_bytes >= _PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Encode and decode what there is, with every encoding."""
        if not self._changes:
            return
        for name, cost in self._found.encodings.items():
            self._measure(name, cost)
        self._changes, self._size_bytes = [], 0
        self._seq += 1

    def _measure(self, name: str, cost: Cost) -> None:
        schema = self._pair.schema
        started = _now()
        encoded = encode_changes(schema, self._changes, encodings=(name,))
        header = PartHeader(stream_id="0" * 32, version=1, rank=0, seq=self._seq)
        pieces = encode_part(header, encoded.frames, encoded.payloads, schema=schema)
        cost.encode_s += _now() - started
        cost.bytes += sum(memoryview(piece).nbytes for piece in pieces)
        reading_s = 0.0

        def read_old(tensor: int, box: Box) -> Bits:
            nonlocal reading_s
            begun = _now()
            bits = self._pair.read(self._pair.old, tensor, box)
            reading_s += _now() - begun
            return bits

        started = _now()
        for frame, payload in zip(encoded.frames, encoded.payloads, strict=True):
            decode_frame(schema, frame, payload, read_old, key=f"estimate, {name}")
        cost.decode_s += _now() - started - reading_s
