"""Headers of checkpoint folders: which files count, and what damaged or hostile ones say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.receive.handmade import safetensors, small_trainer
from torch_delta.errors import FormatError, StoreUnavailable
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.receive.folder import SafetensorsFolder, weight_files

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, name: str, *tensors: str, value: int = 1) -> None:
    data = np.full(4, value, "<u2").tobytes()
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(safetensors([(tensor, "BF16", [2, 2], data) for tensor in tensors]))


def test_a_single_file_wins_over_everything_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", "a")
    write(tmp_path, "consolidated.safetensors", "a")
    assert weight_files(tmp_path) == ("model.safetensors",)


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "stream")
    folder = trainer.checkpoint(tmp_path / "folder", num_files=3)
    write(folder, "consolidated.safetensors", "embed.weight")
    opened = SafetensorsFolder.open(folder)
    assert len(opened.files) == 3
    assert sorted(opened.tensors) == trainer.data_names()
    for name, location in opened.tensors.items():
        raw = (folder / location.file).read_bytes()[location.offset_bytes :][: location.size_bytes]
        assert raw == trainer.bits[name].tobytes()


def test_without_an_index_every_file_counts(tmp_path: Path) -> None:
    write(tmp_path, "one.safetensors", "a")
    write(tmp_path, "two.safetensors", "b")
    assert SafetensorsFolder.open(tmp_path).tensors.keys() == {"a", "b"}
    write(tmp_path, "three.safetensors", "b")
    with pytest.raises(FormatError, match=r"'b' is in three.safetensors and in two.safetensors"):
        SafetensorsFolder.open(tmp_path)


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", ".hidden", "nul\0x", "..\\x"]
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="plain file name"):
        weight_files(tmp_path)


def test_an_index_must_name_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FormatError, match=r"'gone.safetensors', which is not in the folder"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=r"model.safetensors.index.json"):
        weight_files(tmp_path)


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off"),
        (b"\x05\0\0\0\0\0\0", "cut off"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "cut off or not a safetensors file"),
        (header() [:-1], "cut off"),
        (b"\x02\0\0\0\0\0\0\0[]", "damaged"),
        (b"\x0d\0\0\0\0\0\0\0" + b'{"a":1,"a":2}', "occurs twice"),
        (header(a={"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}) + b"123", "cut off"),
        (header(a={"dtype": "BF16", "shape": [2], "data_offsets": [0, 6]}) + b"123456", "claims bytes 0 to 6"),
        (header(a={"dtype": "BF16", "shape": [2], "data_offsets": [-4, 0]}), "claims bytes -4"),
        (header(a={"dtype": "BF16", "shape": [-2], "data_offsets": [0, 4]}) + b"1234", "shape"),
        (header(a={"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]}) + b"12", "shape"),
        (header(a={"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}) + b"12345678", "C64"),
        (header(a={"dtype": "BF16", "shape": [2]}) + b"1234", "data_offsets"),
        (
            header(
                a={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                b={"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            )
            + b"123456",
            "'b' overlaps",
        ),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        SafetensorsFolder.open(tmp_path)


def test_no_weights_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no \*\.safetensors"):
        SafetensorsFolder.open(tmp_path)
    with pytest.raises(StoreUnavailable, match="cannot list"):
        SafetensorsFolder.open(tmp_path / "gone")


def test_differences_name_every_kind(tmp_path: Path) -> None:
    # F11: a tensor the other side does not have is an error with its name, not a skipped write.
    write(tmp_path, "model.safetensors", "a", "b", "extra", "tied")
    opened = SafetensorsFolder.open(tmp_path)
    schema = Schema(
        (
            TensorSpec("a", "BF16", (2, 2)),
            TensorSpec("absent_tie", "BF16", (2, 2), "a"),
            TensorSpec("b", "F16", (2, 2)),
            TensorSpec("missing", "BF16", (2, 2)),
            TensorSpec("tied", "BF16", (2, 2), "a"),
        )
    )
    assert opened.differences(schema) == [
        "b: expected F16 [2, 2], got BF16 [2, 2] in model.safetensors",
        "missing: missing, expected BF16 [2, 2]",
        "extra: the stream has no such tensor",
    ]
    assert opened.differences(schema, allow_extra=["extra"])[-1].startswith("missing")
