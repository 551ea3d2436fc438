"""Bytes on recorded training steps, where the traces are at hand (benchmarks measure the speed)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.traces import recorded
from torch_delta.codec.change import Change, diff
from torch_delta.codec.encode import encode_changes
from torch_delta.format.box import Box
from torch_delta.format.part import PartHeader, encode_part
from torch_delta.format.schema import Schema, TensorSpec

TRACES = Path(os.environ.get("TORCH_DELTA_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"))

# Bits per changed element of another system's xor + zstd-1 stream for the same steps, its manifest included.
PEER = {
    "minilm-lr1e-06-warm-19-20": 24.8,
    "minilm-lr3e-06-warm-19-20": 21.9,
    "minilm-lr3e-06-warm-16-20": 17.6,
    "minilm-lr1e-05-nowarm-00-01": 15.0,
    "qwen-lr3e-06-warm-04-20": 12.5,
}


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded traces; set TORCH_DELTA_TRACES")
@pytest.mark.parametrize("name", PEER)
def test_xor_parts_are_no_larger_than_the_peers(name: str) -> None:
    pair = recorded(TRACES, name)
    names = sorted(pair.old)
    schema = Schema(tuple(TensorSpec(n, "BF16", tuple(pair.old[n].shape)) for n in names))
    changes = []
    for tensor, n in enumerate(names):
        old, new = (side[n].view(torch.int16).numpy().view(np.uint16) for side in (pair.old, pair.new))
        index = diff(old, new)
        flat = old.reshape(-1)[index], new.reshape(-1)[index]
        changes.append(Change(tensor=tensor, box=Box.whole(old.shape), index=index, old=flat[0], new=flat[1]))
    part = encode_changes(schema, changes)
    header = PartHeader(stream_id="0" * 32, version=1, rank=0, seq=0)
    stored = sum(map(len, encode_part(header, part.frames, part.payloads, schema=schema)))
    assert 8 * stored / pair.num_changed <= PEER[name]
