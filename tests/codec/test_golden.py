"""The golden stream, whose writer knows docs/format.md only, decoded version by version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts import make_golden_stream
from torch_delta.codec.bits import bits_dtype
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.digest import digest_array
from torch_delta.errors import DigestMismatch
from torch_delta.format.part import parse_part
from torch_delta.format.schema import Schema
from torch_delta.format.streaminfo import StreamInfo

FOLDER = Path(__file__).resolve().parents[1] / "golden" / make_golden_stream.NAME
STREAM = StreamInfo.from_bytes((FOLDER / "stream.json").read_bytes())
SCHEMA = Schema.from_bytes((FOLDER / "schema" / f"{STREAM.schema_id}.json").read_bytes())


def arrays(state: dict[str, list[int]]) -> dict[int, np.ndarray]:
    found = {}
    for tensor in SCHEMA.data_indices:
        spec = SCHEMA.tensors[tensor]
        found[tensor] = np.array(state[spec.name], bits_dtype(spec.dtype)).reshape(spec.shape)
    return found


def read(bits: dict[int, np.ndarray]):
    return lambda tensor, box: bits[tensor][
        tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
    ].reshape(box.shape)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version(version: int) -> None:
    states = make_golden_stream.states()
    old, expected = arrays(states[version - 1]), arrays(states[version])
    new = {tensor: bits.copy() for tensor, bits in old.items()}
    digests = {tensor: digest_array(bits) for tensor, bits in old.items()}
    for path in sorted((FOLDER / "parts" / f"{version:020d}").glob("*")):
        part = parse_part(path.read_bytes(), schema=SCHEMA, key=path.name)
        for frame in part.frames:
            for change in decode_frame(SCHEMA, frame, part.payload(frame), read(old)):
                new[change.tensor].reshape(-1)[change.flat_index(SCHEMA)] = change.new
                digests[change.tensor] += change.increment
    for tensor, bits in expected.items():
        assert np.array_equal(new[tensor], bits)
        assert digests[tensor] == digest_array(bits)


def test_every_frame_refuses_another_base() -> None:
    states = make_golden_stream.states()
    refused = set()
    for version in (1, 3):
        wrong = {tensor: ~bits for tensor, bits in arrays(states[version - 1]).items()}
        for path in (FOLDER / "parts" / f"{version:020d}").glob("*"):
            part = parse_part(path.read_bytes(), schema=SCHEMA, key=path.name)
            for frame in part.frames:
                with pytest.raises(DigestMismatch):
                    decode_frame(SCHEMA, frame, part.payload(frame), read(wrong))
                refused.add(frame.encoding)
    assert refused == {"coo", "xor", "dense"}
