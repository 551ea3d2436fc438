"""Bytes per version of every encoding on recorded training steps, beside the information bound of the same steps.

    python benchmarks/bytes.py                         # all recorded traces
    python benchmarks/bytes.py --only qwen --json out.json

The bound is per tensor: the adaptive (Krichevsky-Trofimov) code length of changed / unchanged given the old exponent,
plus the adaptive (Dirichlet 1/2) code length of the step in representable values given the old exponent, in which steps
beyond four are one symbol and cost about twice the logarithm of what is left. Nothing is charged for it but that; our
side pays for everything a version adds to the stream: payload, tables, digests, container and commit.

Peer figures are bits per changed element of SkyRL's real publisher with its manifest, measured once on these traces.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from traces import Pair, names, recorded, synthetic

from torch_delta.codec.change import Change, diff
from torch_delta.codec.encode import encode_changes
from torch_delta.codec.packed.reduced import reduce_change
from torch_delta.format.box import Box
from torch_delta.format.commit import Commit, PartRef
from torch_delta.format.keys import part_key
from torch_delta.format.part import PartHeader, encode_part
from torch_delta.format.schema import Schema, TensorSpec

DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
PEER_BITS = {
    "minilm-lr1e-06-warm-19-20": 24.8,
    "minilm-lr3e-06-warm-19-20": 21.9,
    "minilm-lr3e-06-warm-16-20": 17.6,
    "minilm-lr1e-05-nowarm-00-01": 15.0,
    "qwen-lr3e-06-warm-04-20": 12.5,
}
COO_BITS = 48.0
_NUM_STEP_SYMBOLS = 10
gammaln = np.vectorize(math.lgamma, otypes=[float])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trace under one way of writing it; all figures in bits per changed element but the first three."""

    trace: str
    encoding: str
    density: float
    bound: float
    payload: float
    total: float
    peer: float | None


def code_length(changed: np.ndarray, total: np.ndarray) -> float:
    """Adaptive code length of which of `total` elements changed, in bits, summed over contexts."""
    k, n = changed[total > 0].astype(float), total[total > 0].astype(float)
    return float(-(gammaln(k + 0.5) + gammaln(n - k + 0.5) - gammaln(n + 1) - np.log(np.pi)).sum() / np.log(2))


def symbol_length(counts: np.ndarray) -> float:
    """Adaptive code length of symbols, in bits; `[contexts, symbols]`."""
    counts = counts[counts.sum(axis=1) > 0].astype(float)
    size, n = counts.shape[1], counts.sum(axis=1)
    start = gammaln(size / 2) - size * gammaln(0.5)
    return float(-(start + gammaln(counts + 0.5).sum(axis=1) - gammaln(n + size / 2)).sum() / np.log(2))


def bound_bits(old: np.ndarray, new: np.ndarray) -> float:
    """The bound of one bf16 tensor, in bits."""
    is_changed = old != new
    exponent = (old >> 7 & 255).astype(np.int64)
    bits = code_length(np.bincount(exponent[is_changed], minlength=256), np.bincount(exponent, minlength=256))
    if not is_changed.any():
        return bits

    def order(bits: np.ndarray) -> np.ndarray:
        signed = bits.view(np.int16).astype(np.int64)
        return np.where(signed < 0, -1 - (signed & 0x7FFF), signed)

    step = order(new[is_changed]) - order(old[is_changed])
    size = np.abs(step)
    counts = np.zeros((256, _NUM_STEP_SYMBOLS))
    np.add.at(counts, (exponent[is_changed], np.minimum(size - 1, 4) * 2 + (step < 0)), 1)
    rest = size[size > 4] - 4
    return bits + symbol_length(counts) + float((2 * np.log2(np.maximum(rest, 1)) + 1).sum())


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def stored_bytes(pair: Pair, encodings: tuple[str, ...], *, small: bool) -> tuple[int, int]:
    """Payload bytes, and everything the version adds to a stream."""
    tensors = sorted(pair.old)
    schema = Schema(tuple(TensorSpec(name, "BF16", tuple(pair.old[name].shape)) for name in tensors))
    changes = []
    for tensor, name in enumerate(tensors):
        old, new = bits_of(pair.old[name]), bits_of(pair.new[name])
        index, box = diff(old, new), Box.whole(old.shape)
        before, after = old.reshape(-1)[index], new.reshape(-1)[index]
        reduced = reduce_change("BF16", box, index, before, after, old) if small and index.size else None
        changes.append(Change(tensor=tensor, box=box, index=index, old=before, new=after, reduced=reduced))
    part = encode_changes(schema, changes, encodings=encodings)
    header = PartHeader(stream_id="0" * 32, version=1, rank=0, seq=0)
    size = sum(map(len, encode_part(header, part.frames, part.payloads, schema=schema)))
    ref = PartRef(
        key=part_key(1, 0, 0, "0" * 16),
        stored_bytes=size,
        sha256="0" * 64,
        rank=0,
        num_slices=sum(len(frame.slices) for frame in part.frames),
        num_changed=pair.num_changed,
    )
    commit = Commit(
        stream_id="0" * 32,
        version=1,
        parent_sha256="0" * 64,
        schema_id=schema.id,
        required_features=("packed",),
        parts=(ref,),
        state_sha256="0" * 64,
        num_changed=pair.num_changed,
        info={"writer": "torch_delta", "step": "1", "nonce": "0" * 16},
    )
    payload = sum(len(memoryview(data).cast("B")) for named in part.payloads for data in named.values())
    return payload, size + len(commit.to_bytes())


WAYS: dict[str, tuple[tuple[str, ...], bool]] = {
    "packed small": (("coo", "packed", "xor", "dense"), True),
    "packed fast": (("coo", "packed", "xor", "dense"), False),
    "xor": (("coo", "xor", "dense"), False),
    "coo": (("coo",), False),
}


def rows_of(pair: Pair) -> list[Row]:
    """All ways of writing one pair."""
    bound = sum(bound_bits(bits_of(pair.old[n]).reshape(-1), bits_of(pair.new[n]).reshape(-1)) for n in pair.old)
    rows = []
    for way, (encodings, small) in WAYS.items():
        payload, total = stored_bytes(pair, encodings, small=small)
        rows.append(
            Row(
                trace=pair.name,
                encoding=way,
                density=pair.density,
                bound=bound / pair.num_changed,
                payload=8 * payload / pair.num_changed,
                total=8 * total / pair.num_changed,
                peer=PEER_BITS.get(pair.name),
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = [
        "| trace | density | way | bound | payload | total | payload / bound | total / bound | total / SkyRL | / COO |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peer = "-" if row.peer is None else f"{row.total / row.peer:.3f}"
        lines.append(
            f"| {row.trace} | {row.density:.2%} | {row.encoding} | {row.bound:.2f} | {row.payload:.2f} | "
            f"{row.total:.2f} | {row.payload / row.bound:.3f} | {row.total / row.bound:.3f} | {peer} | "
            f"{row.total / COO_BITS:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of recorded steps")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    found = [name for name in names(args.traces) if args.only in name] if args.traces.is_dir() else []
    pairs = (recorded(args.traces, name) for name in found) if found else iter([synthetic(width=256)])
    rows = [row for pair in pairs for row in rows_of(pair)]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
