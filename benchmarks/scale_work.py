"""The real work of one sender's shards, in the real code, phase by phase: what `scale_model.py` measures and checks.

    fp32 masters ──Ledger (sweep, digest, reduce)──▶ changes ──encode──▶ a part ──parse, decode, prove──▶ applied

Every phase runs on one thread and is timed in CPU seconds of that thread, so that other load on the machine counts as
little as it can. Memory is that of one batch of shards at a time, whatever the model.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_delta.capture import arrays
from torch_delta.capture.history import Persistent
from torch_delta.capture.ledger import Ledger
from torch_delta.capture.placement import Placement
from torch_delta.capture.regions import Piece, row_major
from torch_delta.capture.sweep import sweep, sweep_masters
from torch_delta.codec import decode_frame, encode_changes
from torch_delta.format.box import Box
from torch_delta.format.commit import PartRef
from torch_delta.format.digest import Digest
from torch_delta.format.keys import new_nonce, part_key
from torch_delta.format.part import PartHeader, encode_part, parse_part
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.publish.coverage import Ownership
from torch_delta.publish.records import Receipt, SliceRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

PHASES = ("capture", "encode", "decode")
STREAM_ID = "0" * 32


@dataclass(frozen=True, kw_only=True)
class Work:
    """What was done, and what it took."""

    elements: int
    slices: int
    changed: int
    stored_bytes: int
    seconds: dict[str, float]
    """By phase, CPU of one thread."""


class Rows:
    """Some rows of a tensor as this rank's shard: fp32 masters, served in bf16."""

    def __init__(self, tensor: int, spec: TensorSpec, box: Box, masters: torch.Tensor) -> None:
        self.name = spec.name
        self.masters = masters
        self.pieces = (Piece(tensor, box, 0, row_major(box.shape)),)
        self.starts = np.array([0, box.numel], dtype=np.int64)

    def current(self) -> torch.Tensor:
        return arrays.to_bits(self.masters, torch.bfloat16)

    def sweep(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = sweep_masters(before, self.masters)
        return found if found is not None else sweep(before, self.current())


def shard(shape: tuple[int, ...], rank: int, world_size: int) -> Box | None:
    """This rank's rows, as FSDP2 cuts them; None if it has none."""
    rows = -(-shape[0] // world_size)
    first = min(rank * rows, shape[0])
    count = min(rows, shape[0] - first)
    return Box((first, *(0 for _ in shape[1:])), (count, *shape[1:])) if count else None


def trained(num: int, density: float, rng: np.random.Generator) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Masters on the bf16 grid, where a step moves them, and their bits after it.

    As in training, most move by one unit in the last place, and the chance halves with every exponent.
    """
    values = rng.standard_normal(num, dtype=np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    chance = np.exp2(-((bits >> 7) & 0xFF).astype(np.float32) + 120)
    for _ in range(8):  # the smallest weights always change: what they cannot take, the others do
        chance = np.minimum(chance * np.float32(density / chance.mean()), np.float32(0.5))
    where = np.flatnonzero(rng.random(num, dtype=np.float32) < chance)
    moved = bits[where] + rng.choice(np.array([1, 1, 1, 1, 1, 2], np.uint16), where.size)
    masters = torch.from_numpy(bits.astype(np.uint32) << np.uint32(16)).view(torch.float32)
    return masters, where, moved


def one_sender(
    schema: Schema, boxes: Sequence[tuple[int, Box]], density: float, rng: np.random.Generator, *, rank: int = 0
) -> Work:
    """Capture, encode and decode one version of some shards.

    Args:
        schema: of the model.
        boxes: (tensor, box) that this sender owns; their bits are in memory together.
        density: changed elements over all.
        rng: for weights and changes.
        rank: of the sender.
    """
    units, steps = [], []
    for tensor, box in boxes:
        masters, where, moved = trained(box.numel, density, rng)
        units.append(Rows(tensor, schema.tensors[tensor], box, masters))
        steps.append((where, moved))
    ledger = Ledger(schema, units, [Persistent(unit, Placement(kind="cpu")) for unit in units])
    mine = {(tensor, box): arrays.host(unit.current()).copy() for (tensor, box), unit in zip(boxes, units, strict=True)}
    for unit, (where, moved) in zip(units, steps, strict=True):
        unit.masters.view(torch.int32).numpy().view(np.uint32)[where] = moved.astype(np.uint32) << np.uint32(16)
    seconds = dict.fromkeys(PHASES, 0.0)

    started = time.thread_time()
    ledger.begin()
    for number in range(len(units)):
        ledger.take(number)
    collected = ledger.finish()
    seconds["capture"] = time.thread_time() - started

    started = time.thread_time()
    encoded = encode_changes(schema, collected.changes)
    header = PartHeader(stream_id=STREAM_ID, version=1, rank=rank, seq=0)
    data = b"".join(encode_part(header, encoded.frames, encoded.payloads, schema=schema))
    seconds["encode"] = time.thread_time() - started

    def read_old(tensor: int, box: Box) -> np.ndarray:
        for (number, outer), bits in mine.items():
            if number == tensor and _is_inside(box, outer):
                window = tuple(
                    slice(at - start, at - start + size)
                    for at, start, size in zip(box.offset, outer.offset, box.shape, strict=True)
                )
                return bits.reshape(outer.shape)[window]
        raise AssertionError(f"no shard holds {box} of tensor {tensor}")

    started = time.thread_time()
    part = parse_part(data, schema=schema, key="parts/simulated")
    applied = [
        (change, read_old(change.tensor, change.box))
        for frame in part.frames
        for change in decode_frame(schema, frame, part.payload(frame), read_old)
    ]
    for change, region in applied:
        index = np.unravel_index(change.positions().astype(np.int64), region.shape)
        region[index] = change.new.reshape(-1)
    seconds["decode"] = time.thread_time() - started

    for (tensor, box), unit in zip(boxes, units, strict=True):
        if not np.array_equal(mine[tensor, box], arrays.host(unit.current())):
            raise AssertionError(f"{unit.name}: the receiver's bits are not the sender's")
    return Work(
        elements=sum(box.numel for _, box in boxes),
        slices=len(boxes),
        changed=collected.num_changed,
        stored_bytes=len(data),
        seconds=seconds,
    )


def one_commit(world_size: int, slices_per_rank: int) -> float:
    """CPU seconds rank 0 takes to read and check the receipts of one version; its puts are not counted."""
    schema = Schema(tuple(TensorSpec(f"t{number:05d}", "BF16", (world_size, 8)) for number in range(slices_per_rank)))
    boxes = {
        rank: tuple((tensor, Box((rank, 0), (1, 8))) for tensor in range(slices_per_rank)) for rank in range(world_size)
    }
    ownership = Ownership(schema, boxes)
    increment = Digest((1, 2))
    payloads = []
    for rank in range(world_size):
        part = PartRef(
            key=part_key(1, rank, 0, new_nonce()),
            stored_bytes=1,
            sha256="0" * 64,
            rank=rank,
            num_slices=slices_per_rank,
            num_changed=1,
        )
        records = tuple(SliceRecord(tensor=tensor, box=box, increment=increment) for tensor, box in boxes[rank])
        payloads.append(Receipt(parts=(part,), slices=records).to_bytes())
    gc.collect()
    started = time.thread_time()
    totals: dict[int, Digest] = {}
    for rank, payload in enumerate(payloads):
        receipt = Receipt.from_bytes(payload)
        objection = ownership.objection(rank, ((record.tensor, record.box) for record in receipt.slices))
        assert objection is None, objection
        for record in receipt.slices:
            known = totals.get(record.tensor)
            totals[record.tensor] = record.increment if known is None else known + record.increment
    return time.thread_time() - started


def _is_inside(inner: Box, outer: Box) -> bool:
    return all(
        start <= at and at + size <= start + length
        for at, size, start, length in zip(inner.offset, inner.shape, outer.offset, outer.shape, strict=True)
    )
