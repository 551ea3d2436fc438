"""`torch-delta estimate`: literal counts, sizes laid out by hand, a bound added up symbol by symbol, bounded memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from math import ceil, log2
from typing import TYPE_CHECKING

import pytest

from tests.cli.streams import SCHEMA, base_state, write_checkpoint
from torch_delta.cli import estimate, main, pairs
from torch_delta.format.box import Box
from torch_delta.format.digest import Digest
from torch_delta.format.part import Frame, PartHeader, Slice, encode_part

if TYPE_CHECKING:
    from pathlib import Path

CHANGES = {"a.weight": {0: 0x3F81, 9: 0x3F88, 31: 0xBF9F}, "b.bias": {1: 0x80000000}}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    state = base_state()
    old = write_checkpoint(tmp_path / "old", state)
    for name, values in CHANGES.items():
        for index, bits in values.items():
            state[name][index] = bits
    return old, write_checkpoint(tmp_path / "new", state)


def measured(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["estimate", *argv, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def adaptive_bits(symbols: list[int], num_symbols: int) -> float:
    """Sent one after the other, each with the share it had so far: (count + 1/2) / (all + number / 2)."""
    counts, total = [0] * num_symbols, 0.0
    for sent, symbol in enumerate(symbols):
        total -= log2((counts[symbol] + 0.5) / (sent + num_symbols / 2))
        counts[symbol] += 1
    return total


def test_counts_and_sizes_are_literal(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    got = measured(capsys, *map(str, folders), "--link-mbps", "8")
    assert {
        name: got[name] for name in ("total_elements", "changed_elements", "full_bytes", "link_mbps", "num_tensors")
    } == {
        "total_elements": 35,
        "changed_elements": 4,
        "full_bytes": 76,
        "link_mbps": 8.0,
        "num_tensors": 2,
    }
    assert got["full_link_s"] == pytest.approx(76e-6)  # 8 Mbit/s are 1 MB/s
    assert got["kinds"] == [
        {"kind": "other", "num_tensors": 1, "elements": 32, "changed": 3},
        {"kind": "bias", "num_tensors": 1, "elements": 3, "changed": 1},
    ]
    assert set(got["encodings"]) == {"coo", "xor", "packed"}
    for cost in got["encodings"].values():
        assert cost["encode_s"] > 0
        assert cost["decode_s"] > 0
        assert cost["link_s"] == pytest.approx(cost["bytes"] / 1e6)


def test_coo_takes_the_bytes_of_a_part_laid_out_by_hand(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slices = tuple(
        Slice(number, Box.whole(shape), count, Digest.ZERO) for number, shape, count in ((0, (4, 8), 3), (1, (3,), 1))
    )
    payload = {
        "coo.index.u32": struct.pack("<4I", 0, 9, 31, 1),
        "coo.value.BF16": struct.pack("<3H", *CHANGES["a.weight"].values()),
        "coo.value.F32": struct.pack("<I", 0x80000000),
    }
    header = PartHeader(stream_id="0" * 32, version=1, rank=0, seq=0)
    by_hand = encode_part(header, [Frame("coo", slices)], [payload], schema=SCHEMA)
    size = sum(memoryview(piece).nbytes for piece in by_hand)
    got = measured(capsys, *map(str, folders))["encodings"]["coo"]["bytes"]
    # Digests of nothing compress better than those of a change: up to 16 bytes for each of the two.
    assert size <= got <= size + 64


def test_the_bound_is_what_adaptive_coding_would_take(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """By tensor and old exponent: flags of what changed, then steps of 1 to 4, up or down, or an escape."""
    # a.weight: 0x3F80 to 0x3F9F, one exponent. Steps: +1, -1, and 0x3F9F -> 0xBF9F, all the way through zero.
    up_1, down_1, escape_down = 0, 1, 9
    through_zero = 0x3F9F + 0x3F9F + 1
    flags = [1 if at in CHANGES["a.weight"] else 0 for at in range(32)]
    bits = adaptive_bits(flags, 2) + adaptive_bits([up_1, down_1, escape_down], 10)
    bits += 2 * log2(through_zero - 4) + 1
    # b.bias: 1.0, 0.0 and -0.0 unchanged but for 0.0 -> -0.0, one step down; exponents 127, 0, 0.
    bits += adaptive_bits([0], 2) + adaptive_bits([1, 0], 2) + adaptive_bits([down_1], 10)
    assert measured(capsys, *map(str, folders))["bound_bytes"] == ceil(bits / 8)


def test_nothing_changed_costs_nothing(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    got = measured(capsys, str(folders[0]), str(folders[0]))
    assert got["changed_elements"] == 0
    assert {cost["bytes"] for cost in got["encodings"].values()} == {0}
    assert got["full_link_s"] is None
    assert main(["estimate", str(folders[0]), str(folders[0])]) == 0
    assert "0 elements changed (0.000%)" in capsys.readouterr().out


def test_small_boxes_and_parts_find_the_same(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(capsys, *map(str, folders))
    monkeypatch.setattr(pairs, "BOX_BYTES", 16)
    monkeypatch.setattr(estimate, "_PART_BYTES", 1)
    cut = measured(capsys, *map(str, folders))
    for name in ("total_elements", "changed_elements", "full_bytes", "bound_bytes", "kinds"):
        assert cut[name] == whole[name]
    assert cut["encodings"]["coo"]["bytes"] > whole["encodings"]["coo"]["bytes"]  # four parts


def test_memory_does_not_grow_with_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MiB a side, a megabyte at a time."""
    monkeypatch.setattr(pairs, "BOX_BYTES", 1 << 20)
    monkeypatch.setattr(estimate, "_PART_BYTES", 1 << 16)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [0, 1 << 25]}}).encode()
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        row = bytearray(b"\x80\x3f" * 4096)
        row[0] ^= side == "new"
        with (tmp_path / side / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.writelines(bytes(row) for _ in range(4096))
    argv = (str(tmp_path / "old"), str(tmp_path / "new"))
    measured(capsys, *argv)  # whatever is compiled or cached is there now
    tracemalloc.start()
    got = measured(capsys, *argv)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert got["changed_elements"] == 4096
    assert peak_bytes < 24 << 20


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"b.bias": [0, 0, 0]}, "a.weight: missing, expected BF16 [4, 8]"),
        ({**base_state(), "more": [1]}, "more: not in"),
    ],
)
def test_other_tensors_are_an_error_that_says_which(
    tmp_path: Path, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tensors: dict, message: str
) -> None:
    """F11: nothing is skipped because the other side does not have it."""
    other = tmp_path / "other"
    other.mkdir()
    entries, data = {}, b""
    for name, values in tensors.items():
        wide = name != "a.weight"
        packed = struct.pack(f"<{len(values)}{'I' if wide else 'H'}", *values)
        shape = [len(values)] if wide else [4, 8]
        at = [len(data), len(data) + len(packed)]
        entries[name] = {"dtype": "F32" if wide else "BF16", "shape": shape, "data_offsets": at}
        data += packed
    header = json.dumps(entries).encode()
    (other / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    assert main(["estimate", str(folders[0]), str(other), "--json"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert json.loads(captured.out)["error"]["type"] == "BaseMismatch"


def test_a_folder_without_weights_is_an_error(
    tmp_path: Path, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", str(folders[0]), str(tmp_path)]) == 1
    assert "no *.safetensors file" in capsys.readouterr().err
    assert main(["estimate", str(folders[0]), str(tmp_path / "absent")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.layers.0.self_attn.q_proj.bias", "bias"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "experts"),
        ("rotary.inv_freq", "other"),
    ],
)
def test_kinds_of_tensors(name: str, kind: str) -> None:
    assert estimate.kind_of(name) == kind
