"""The golden stream with packed frames, whose writer knows docs/format.md only, decoded version by version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from scripts import make_golden_packed
from tests.codec.test_golden import read
from torch_delta.codec.bits import bits_dtype
from torch_delta.codec.decode import decode_frame
from torch_delta.codec.digest import digest_array
from torch_delta.errors import DigestMismatch, UnsupportedFormat
from torch_delta.format import checks
from torch_delta.format.commit import Commit
from torch_delta.format.digest import state_sha256
from torch_delta.format.part import parse_part
from torch_delta.format.schema import Schema
from torch_delta.format.streaminfo import StreamInfo

FOLDER = Path(__file__).resolve().parents[1] / "golden" / make_golden_packed.NAME
STREAM = StreamInfo.from_bytes((FOLDER / "stream.json").read_bytes())
SCHEMA = Schema.from_bytes((FOLDER / "schema" / f"{STREAM.schema_id}.json").read_bytes())


def arrays(state: dict[str, list[int]]) -> dict[int, np.ndarray]:
    return {
        tensor: np.array(state[spec.name], bits_dtype(spec.dtype)).reshape(spec.shape)
        for tensor, spec in enumerate(SCHEMA.tensors)
    }


def test_the_files_are_what_the_script_writes() -> None:
    stored = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert stored == make_golden_packed.golden()


def test_every_version() -> None:
    states = make_golden_packed.states()
    digests = dict(enumerate(STREAM.base.digests))
    for version in (1, 2):
        key = f"commits/{version:020d}.json"
        commit = Commit.from_bytes((FOLDER / key).read_bytes(), key=key)
        assert commit.required_features == ("packed",)
        old, expected = arrays(states[version - 1]), arrays(states[version])
        new = {tensor: bits.copy() for tensor, bits in old.items()}
        for ref in commit.parts:
            data = (FOLDER / ref.key).read_bytes()
            assert hashlib.sha256(data).hexdigest() == ref.sha256
            part = parse_part(data, schema=SCHEMA, key=ref.key)
            part.check_reference(ref, commit)
            for frame in part.frames:
                assert frame.encoding == "packed"
                for change in decode_frame(SCHEMA, frame, part.payload(frame), read(old)):
                    new[change.tensor].reshape(-1)[change.flat_index(SCHEMA)] = change.new
                    digests[change.tensor] += change.increment
        for tensor, bits in expected.items():
            assert np.array_equal(new[tensor], bits)
            assert digests[tensor] == digest_array(bits)
        assert state_sha256(digests.values()) == commit.state_sha256


@pytest.mark.parametrize("version", [1, 2])
def test_every_frame_refuses_another_base(version: int) -> None:
    wrong = {tensor: ~bits for tensor, bits in arrays(make_golden_packed.states()[version - 1]).items()}
    for path in sorted((FOLDER / "parts" / f"{version:020d}").glob("*")):
        part = parse_part(path.read_bytes(), schema=SCHEMA, key=path.name)
        for frame in part.frames:
            with pytest.raises(DigestMismatch):
                decode_frame(SCHEMA, frame, part.payload(frame), read(wrong))


def test_an_older_reader_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:  # rules I4 and R1
    monkeypatch.setattr(checks, "SUPPORTED_FEATURES", frozenset())
    with pytest.raises(UnsupportedFormat, match="packed"):
        StreamInfo.from_bytes((FOLDER / "stream.json").read_bytes())
    key = "commits/00000000000000000001.json"
    with pytest.raises(UnsupportedFormat, match="packed"):
        Commit.from_bytes((FOLDER / key).read_bytes(), key=key)
