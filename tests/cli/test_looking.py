"""`log` and `inspect`: what they show of a stream whose contents the test chose."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.streams import NONCE, STREAM_ID, StreamMaker, three_versions
from torch_delta.cli import main
from torch_delta.cli.output import human_bytes, human_seconds, times_smaller

if TYPE_CHECKING:
    from pathlib import Path

PART_1_0 = f"parts/00000000000000000001/00000-0000-{NONCE}.safetensors"
PART_1_1 = f"parts/00000000000000000001/00001-0000-{NONCE}.safetensors"


@pytest.fixture
def maker(tmp_path: Path) -> StreamMaker:
    return three_versions(tmp_path / "stream")


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict:
    assert main([*argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_log_as_json_has_the_documented_fields(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.anchor()
    got = run_json(capsys, "log", str(maker.root))
    versions = got.pop("versions")
    assert got == {
        "url": maker.store.url,
        "stream_id": STREAM_ID,
        "base": {"kind": "local", "name": "tiny", "revision": None},
        "absolute_only": False,
        "num_tensors": 2,  # the tied one is counted once
        "num_elements": 35,
        "full_bytes": 76,
        "head": 3,
        "successor": None,
        "anchors": [3],
    }
    files = {path.name: path.stat().st_size for path in (maker.root / "parts" / "00000000000000000001").iterdir()}
    modified_s = [version.pop("modified_s") for version in versions]
    assert modified_s == sorted(modified_s)
    assert versions[0] == {
        "version": 1,
        "num_changed": 3,
        "stored_bytes": sum(files.values()),
        "num_parts": 2,
        "commit_sha256": maker.stream.commit(1).sha256,
        "info": {"step": "10", "nonce": NONCE},
    }
    assert [version["num_changed"] for version in versions] == [3, 1, 0]


def test_log_as_a_table(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.anchor()
    assert main(["log", str(maker.root), "--last", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"stream {STREAM_ID} at ")
    assert lines[2] == "state  2 tensors, 35 elements, 76 B; head is version 3"
    rows = [line.split() for line in lines[4:]]
    assert rows[0][:3] == ["version", "changed", "%"]
    assert [row[0] for row in rows[1:]] == ["2", "3"]
    assert rows[1][1:3] == ["1", "2.857%"]
    assert rows[2][1:3] == ["0", "0.000%"]
    assert rows[2][-1] == "yes"


def test_log_of_a_stream_without_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StreamMaker(tmp_path / "stream")
    got = run_json(capsys, "log", str(tmp_path / "stream"))
    assert (got["head"], got["versions"], got["anchors"]) == (0, [], [])


def test_log_where_there_is_no_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", str(tmp_path), "--json"]) == 1
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (error["type"], error["action"]) == ("ObjectNotFound", "retry")
    assert "there is no stream here" in error["message"]
    assert "ObjectNotFound" in said.err
    assert not list(tmp_path.iterdir())  # looking creates nothing


def test_inspect_of_a_version_lists_its_slices(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_json(capsys, "inspect", str(maker.root), "1")
    assert (got["version"], got["num_changed"], got["key"]) == (1, 3, "commits/00000000000000000001.json")
    assert got["parent_sha256"] == maker.stream.info_sha256
    assert [part["key"] for part in got["parts"]] == [PART_1_0, PART_1_1]
    (frame,) = got["parts"][0]["frames"]
    assert (frame["encoding"], frame["stored_bytes"]) == ("coo", 2 * 4 + 2 + 4)
    slices = [{k: v for k, v in item.items() if k != "increment"} for item in frame["slices"]]
    assert slices == [
        {"tensor": "a.weight", "dtype": "BF16", "offset": [0, 0], "shape": [2, 8], "num_changed": 1},
        {"tensor": "b.bias", "dtype": "F32", "offset": [0], "shape": [3], "num_changed": 1},
    ]
    assert run_json(capsys, "inspect", str(maker.root), got["key"]) == got
    assert run_json(capsys, "inspect", str(maker.root), PART_1_1) == got["parts"][1]


def test_inspect_as_tables(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(maker.root), "1", "--slices", "1"]) == 0
    text = capsys.readouterr().out
    assert "changed  3 of 35 (8.571%)" in text
    assert re.search(r"^a.weight +BF16 +0:2, 0:8 +0 +1 +6.250%$", text, re.MULTILINE)
    assert "and 1 slice with fewer changes; --slices 0 shows all" in text
    assert main(["inspect", str(maker.root), "1", "--slices", "0"]) == 0
    assert re.search(r"^b.bias +F32 +whole 3 +0 +1 +33.333%$", capsys.readouterr().out, re.MULTILINE)


def test_inspect_of_the_other_objects(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = maker.anchor()
    assert run_json(capsys, "inspect", str(maker.root), "stream.json")["stream_id"] == STREAM_ID
    assert run_json(capsys, "inspect", str(maker.root), "head.json")["version"] == 3
    assert run_json(capsys, "inspect", str(maker.root), manifest.key)["files"][0]["name"] == "model.safetensors"
    (schema,) = (maker.root / "schema").iterdir()
    tensors = run_json(capsys, "inspect", str(maker.root), f"schema/{schema.name}")["tensors"]
    assert [tensor["name"] for tensor in tensors] == ["a.weight", "b.bias", "tied.weight"]


@pytest.mark.parametrize(
    ("what", "error"),
    [("4", "ChainError"), ("0", "ChainError"), ("../stream.json", "FormatError"), ("parts/x", "FormatError")],
)
def test_inspect_of_what_is_not_there(
    maker: StreamMaker, capsys: pytest.CaptureFixture[str], what: str, error: str
) -> None:
    assert run_json(capsys, "inspect", str(maker.root), what, status=1)["error"]["type"] == error


def test_inspect_refuses_a_damaged_part(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    path = maker.root / PART_1_0
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    assert run_json(capsys, "inspect", str(maker.root), "1", status=1)["error"]["type"] == "FormatError"


def test_a_reader_that_leaves_early_is_no_error(maker: StreamMaker) -> None:
    """`torch-delta log URL | head -1` must not end in a traceback."""
    code = f"{sys.executable} -m torch_delta.cli inspect {maker.root} stream.json | true; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (run.stdout.strip(), run.stderr) == ("0", "")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1 << 20, "1.00 MiB"),
        (123 << 20, "123 MiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


def test_human_seconds_and_ratios() -> None:
    assert [human_seconds(s) for s in (0, 119, 120, 7199, 7200, 172_799, 172_800)] == [
        "0s",
        "119s",
        "2m",
        "120m",
        "2h",
        "48h",
        "2d",
    ]
    assert [times_smaller(*pair) for pair in ((1000, 0), (1000, 10), (10, 4), (1, 10))] == ["-", "100", "2.5", "0.1"]
