"""What each rank brings when attaching: its boxes, their digests, and the digests of its share of the base."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.codec.digest import digest_array
from torch_delta.errors import CaptureError
from torch_delta.format.digest import Digest
from torch_delta.publish.records import pack_owned, unpack_owned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_delta.capture.source import OwnedBox
    from torch_delta.format.schema import Schema
    from torch_delta.publish.anchors import AnchorJob
    from torch_delta.publish.base import BaseCheckpoint
    from torch_delta.publish.coverage import TensorBox

_ALIKE = (
    "every", "max_in_flight", "anchor_first", "anchor_every", "anchor_share", "anchor_file_bytes", "absolute_only",
    "on_restart",
)  # fmt: skip
_COUNT = struct.Struct("<I")
_ROW = struct.Struct("<I16s")  # tensor, digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One rank's contribution to the exchange."""

    schema_id: str
    config: Mapping[str, object]
    """What every rank must have been given alike."""
    constant: tuple[int, ...]
    """Tensors of the base that no model holds."""
    owned: tuple[TensorBox, ...]
    model: Mapping[int, Digest]
    """By tensor: digest of this rank's boxes of it."""
    base: Mapping[int, Digest]
    """By tensor: digest of the whole tensor in the base; each tensor is read by one rank."""


def make_claim(job: AnchorJob, owned: Sequence[OwnedBox]) -> bytes:
    """This rank's claim, packed. Reads this rank's share of the base.

    Raises:
        BaseMismatch: names, dtypes or shapes differ from the base.
        CaptureError: tensors without an owner and without a base.
    """
    source, schema = job.source, job.source.schema
    constant = tuple(getattr(source, "constant", ()))
    if job.base is not None:
        job.base.check_fits(schema)
    elif constant:
        raise CaptureError(f"{len(constant)} tensors are in no model; without a base nobody knows their values")
    alike = {name: getattr(job.config, name) for name in _ALIKE}
    header = json.dumps({"schema_id": schema.id, "config": alike, "constant": constant}).encode()
    share = _share(schema, job.base, job.team.rank, job.team.world_size)
    return b"".join(
        (_COUNT.pack(len(header)), header, pack_owned(owned), _pack_rows(source.digests()), _pack_rows(share))
    )


def read_claim(data: bytes) -> Claim:
    """Unpack what `make_claim` packed."""
    (length,) = _COUNT.unpack_from(data)
    position = _COUNT.size + length
    header = json.loads(data[_COUNT.size : position])
    owned, taken = unpack_owned(data[position:])
    model, position = _unpack_rows(data, position + taken)
    base, _ = _unpack_rows(data, position)
    return Claim(
        schema_id=header["schema_id"],
        config=header["config"],
        constant=tuple(header["constant"]),
        owned=owned,
        model=model,
        base=base,
    )


def add_up(parts: Iterable[Mapping[int, Digest]]) -> dict[int, Digest]:
    """Digests of tensors from those of their boxes on all ranks."""
    total: dict[int, Digest] = {}
    for part in parts:
        for tensor, digest in part.items():
            total[tensor] = total[tensor] + digest if tensor in total else digest
    return total


def _share(schema: Schema, base: BaseCheckpoint | None, rank: int, world_size: int) -> dict[int, Digest]:
    """Digests of this rank's share of the base's tensors: about as many bytes on every rank, whole tensors."""
    if base is None:
        return {}
    mine: list[str] = []
    loads = [0] * world_size
    for tensor in sorted(schema.data_indices, key=lambda t: (-schema.tensors[t].nbytes, t)):
        reader = loads.index(min(loads))
        loads[reader] += schema.tensors[tensor].nbytes
        if reader == rank:
            mine.append(schema.tensors[tensor].name)
    return {schema.index(name): digest_array(bits) for name, bits in base.bits(sorted(mine))}


def _pack_rows(digests: Mapping[int, Digest]) -> bytes:
    rows = (_ROW.pack(tensor, digest.to_bytes()) for tensor, digest in digests.items())
    return _COUNT.pack(len(digests)) + b"".join(rows)


def _unpack_rows(data: bytes, position: int) -> tuple[dict[int, Digest], int]:
    (count,) = _COUNT.unpack_from(data, position)
    end = position + _COUNT.size + count * _ROW.size
    rows = _ROW.iter_unpack(data[position + _COUNT.size : end])
    return {tensor: Digest.from_bytes(digest) for tensor, digest in rows}, end
