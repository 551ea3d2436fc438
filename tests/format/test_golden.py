"""The golden stream, byte for byte; and every single-bit flip of every object of it is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from scripts import make_golden_stream
from torch_delta.errors import FormatError
from torch_delta.format import (
    AnchorManifest,
    Box,
    Commit,
    Head,
    Schema,
    StreamInfo,
    check_parent,
    check_slices_disjoint,
    digest_words,
    encode_part,
    parse_part,
    state_sha256,
    unit_bytes,
)

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "stream-v1"
OBJECTS = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
STREAM = StreamInfo.from_bytes(OBJECTS["stream.json"])
SCHEMA = Schema.from_bytes(OBJECTS[f"schema/{STREAM.schema_id}.json"], schema_id=STREAM.schema_id)
COMMITS = {key: Commit.from_bytes(data, key=key) for key, data in sorted(OBJECTS.items()) if key.startswith("commits/")}
SHA256 = {ref.key: ref.sha256 for commit in COMMITS.values() for ref in commit.parts}
ANCHOR_KEY = "anchors/00000000000000000002-000000000000000a.json"


def words(dtype: str, raw: bytes) -> list[int]:
    width = unit_bytes(dtype)
    return [int.from_bytes(raw[at : at + width], "little") for at in range(0, len(raw), width)]


def test_the_committed_files_are_what_the_script_writes() -> None:
    assert make_golden_stream.golden() == OBJECTS
    assert len(OBJECTS) == 14


def test_everything_is_written_as_it_was_read() -> None:
    assert STREAM.to_bytes() == OBJECTS["stream.json"]
    assert Schema(SCHEMA.tensors).to_bytes() == SCHEMA.to_bytes() == OBJECTS[f"schema/{SCHEMA.id}.json"]
    for key, commit in COMMITS.items():
        assert commit.to_bytes() == OBJECTS[key]
        for ref in commit.parts:
            part = parse_part(OBJECTS[ref.key], schema=SCHEMA, key=ref.key)
            payloads = [part.payload(frame) for frame in part.frames]
            assert b"".join(encode_part(part.header, part.frames, payloads, schema=SCHEMA)) == OBJECTS[ref.key]
    manifest = AnchorManifest.from_bytes(OBJECTS[ANCHOR_KEY], key=ANCHOR_KEY)
    assert manifest.to_bytes() == OBJECTS[ANCHOR_KEY]
    head = Head.from_bytes(OBJECTS["head.json"])
    assert head.to_bytes() == OBJECTS["head.json"]


def test_the_schema() -> None:
    assert [(t.name, t.dtype, t.shape, t.alias_of) for t in SCHEMA.tensors] == [
        ("bias", "F32", (3,), None),
        ("count", "I64", (), None),
        ("empty", "F16", (0, 4), None),
        ("scale", "F8_E4M3", (2, 3), None),
        ("w", "BF16", (4, 2), None),
        ("w_tied", "BF16", (4, 2), "w"),
    ]
    STREAM.check_schema(SCHEMA)


def test_the_chain() -> None:  # rule C2
    parent = OBJECTS["stream.json"]
    for version, (key, commit) in enumerate(COMMITS.items(), 1):
        assert commit.version == version
        assert commit.stream_id == STREAM.stream_id
        check_parent(commit, hashlib.sha256(parent).hexdigest())
        parent = OBJECTS[key]
    head = Head.from_bytes(OBJECTS["head.json"])
    assert (head.version, head.commit_sha256) == (3, hashlib.sha256(parent).hexdigest())


def test_increments_lead_from_the_base_to_every_state() -> None:  # rule C5
    digests = dict(zip(SCHEMA.data_indices, STREAM.base.digests, strict=True))
    states = make_golden_stream.states()
    for commit in COMMITS.values():
        parts = []
        for ref in commit.parts:
            data = OBJECTS[ref.key]
            assert (len(data), hashlib.sha256(data).hexdigest()) == (ref.stored_bytes, ref.sha256)
            parts.append(parse_part(data, schema=SCHEMA, key=ref.key))
            parts[-1].check_reference(ref, commit)
            for item in parts[-1].slices:
                digests[item.tensor] += item.increment
        check_slices_disjoint([part.frames for part in parts], schema=SCHEMA)
        assert state_sha256(digests.values()) == commit.state_sha256
        for index in SCHEMA.data_indices:
            spec = SCHEMA.tensors[index]
            raw = b"".join(
                value.to_bytes(spec.nbytes // spec.numel, "little") for value in states[commit.version][spec.name]
            )
            assert digest_words(words(spec.dtype, raw)) == digests[index]
    assert [len(commit.parts) for commit in COMMITS.values()] == [2, 0, 2]


def test_slices() -> None:
    found = [
        (frame.encoding, SCHEMA.tensors[item.tensor].name, item.box, item.count)
        for key in sorted(SHA256)
        for frame in parse_part(OBJECTS[key], schema=SCHEMA, key=key).frames
        for item in frame.slices
    ]
    assert found == [
        ("dense", "bias", Box((0,), (3,)), 3),
        ("coo", "w", Box((0, 0), (2, 2)), 2),
        ("coo", "w", Box((2, 0), (2, 2)), 1),
        ("xor", "count", Box((), ()), 1),
        ("xor", "scale", Box((0, 0), (2, 3)), 1),
        ("xor", "w", Box((0, 1), (4, 1)), 2),
        ("coo", "count", Box((), ()), 1),
    ]


@pytest.mark.parametrize("key", sorted(SHA256))
def test_any_safetensors_reader_opens_a_part(key) -> None:
    with safe_open(FOLDER / key, "np") as file:
        assert set(file.keys()) >= {"table", "increment"}
        assert file.get_tensor("increment").shape[1] == 2
        assert json.loads(file.metadata()["torch_delta"])["stream_id"] == STREAM.stream_id


def test_the_anchor() -> None:
    manifest = AnchorManifest.from_bytes(OBJECTS[ANCHOR_KEY], key=ANCHOR_KEY)
    manifest.check_schema(SCHEMA)
    commit_key = "commits/00000000000000000002.json"
    assert manifest.commit_sha256 == hashlib.sha256(OBJECTS[commit_key]).hexdigest()
    assert state_sha256(manifest.digests) == COMMITS[commit_key].state_sha256
    for file in manifest.files:
        data = OBJECTS[file.key]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.stored_bytes, file.sha256)


def accept(key: str, data: bytes) -> None:
    """What a reader does before it trusts an object."""
    if key == "stream.json":
        StreamInfo.from_bytes(data)
    elif key == "head.json":
        Head.from_bytes(data)
    elif key.startswith("commits/"):
        Commit.from_bytes(data, key=key)
    elif key.startswith("schema/"):
        Schema.from_bytes(data, schema_id=STREAM.schema_id)
    elif key == ANCHOR_KEY:
        AnchorManifest.from_bytes(data, key=key)
    else:
        raise AssertionError(key)


@pytest.mark.parametrize("key", sorted(key for key in OBJECTS if key.endswith(".json") and "config" not in key))
def test_every_bit_flip_of_a_sealed_object_is_refused(key) -> None:  # rule J1, rule S1
    data = OBJECTS[key]
    accept(key, data)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            accept(key, bytes(bad))


@pytest.mark.parametrize("key", sorted(SHA256))
def test_every_bit_flip_of_a_part_is_noticed_and_never_crashes_the_parser(key) -> None:
    data = OBJECTS[key]
    accepted = 0
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        assert hashlib.sha256(bad).hexdigest() != SHA256[key]
        try:
            parse_part(bad, schema=SCHEMA, key=key)
        except FormatError:
            continue
        accepted += 1
    # Payload and increments are not the parser's to judge, and names in the header have no checksum of their own.
    assert accepted < 8 * len(data) / 2


@pytest.mark.parametrize("key", sorted(SHA256))
def test_every_truncation_of_a_part_is_refused(key) -> None:
    for length in range(len(OBJECTS[key])):
        with pytest.raises(FormatError):
            parse_part(OBJECTS[key][:length], schema=SCHEMA, key=key)


@pytest.mark.parametrize("value", ["", "yes", "true", "1", "stream-v2", "STREAM-V1", " stream-v1", "all"])
def test_the_script_writes_only_for_the_exact_value(value, tmp_path, capsys) -> None:
    (tmp_path / "stream.json").write_bytes(b"old")
    assert make_golden_stream.main([f"--rewrite={value}"], tmp_path) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["stream.json"]
    assert (tmp_path / "stream.json").read_bytes() == b"old"


def test_the_script_compares_without_the_flag(tmp_path, capsys) -> None:
    assert make_golden_stream.main([]) == 0
    assert make_golden_stream.main([], tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        make_golden_stream.main(["--rewrite"], tmp_path)
    assert "14 of 14 objects differ" in capsys.readouterr().out


def test_the_script_rewrites_and_removes(tmp_path) -> None:
    (tmp_path / "stale.json").write_bytes(b"old")
    assert make_golden_stream.main(["--rewrite", "stream-v1"], tmp_path) == 0
    assert {p.relative_to(tmp_path).as_posix(): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == OBJECTS
