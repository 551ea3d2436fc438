"""`verify`: every kind of damage is named, at the version and object where it is, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.streams import NONCE, StreamMaker, base_state, three_versions, write_checkpoint
from torch_delta.cli import main
from torch_delta.format.box import Box
from torch_delta.format.digest import Digest
from torch_delta.format.keys import part_key
from torch_delta.format.part import Frame, PartHeader, Slice, encode_part
from torch_delta.format.sealed import seal, sha256_hex

if TYPE_CHECKING:
    from collections.abc import Callable

COMMIT_2 = "commits/00000000000000000002.json"
COMMIT_4 = "commits/00000000000000000004.json"
PART_1_1 = f"parts/00000000000000000001/00001-0000-{NONCE}.safetensors"
PART_2_0 = f"parts/00000000000000000002/00000-0000-{NONCE}.safetensors"


def verify(capsys: pytest.CaptureFixture[str], maker: StreamMaker, *more: str) -> dict:
    status = main(["verify", str(maker.root), *more, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert status == (0 if record["ok"] else 1)
    return record


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Do what no store would: change a stored object."""
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at >= 0 else flip(len(data) + at)(data)


@pytest.fixture
def maker(tmp_path: Path) -> StreamMaker:
    return three_versions(tmp_path / "stream")


def test_a_whole_stream(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.anchor()
    maker.publish({"b.bias": {0: 1}})
    record = verify(capsys, maker)
    assert record["ok"]
    assert (record["first"], record["last"], record["num_parts"], record["anchors"]) == (1, 4, 4, [3])
    objects = [path for folder in ("parts", "anchors") for path in (maker.root / folder).glob("*/*")]
    assert record["checked_bytes"] == sum(path.stat().st_size for path in objects)
    assert (record["problems"], record["unproved"], record["num_unreferenced"]) == ([], [], 0)


def test_the_golden_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """Written by another program than the helpers of these tests, with every encoding and a tied tensor."""
    golden = Path(__file__).resolve().parents[1] / "golden" / "stream-v1"
    assert main(["verify", str(golden), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["first"], record["last"], record["problems"], record["unproved"]) == (1, 3, [], [])


def test_a_whole_stream_in_words(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(maker.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("versions 1 to 3, 3 parts, ")
    assert lines[-1] == "OK"


@pytest.mark.parametrize(
    ("damage", "version", "key", "message"),
    [
        pytest.param(lambda m: rewrite(m.root / PART_1_1, flip(-1)), 1, PART_1_1, "damaged", id="flipped payload"),
        pytest.param(lambda m: rewrite(m.root / PART_1_1, flip(9)), 1, PART_1_1, "damaged", id="flipped header"),
        pytest.param(lambda m: rewrite(m.root / PART_1_1, lambda d: d[:-1]), 1, PART_1_1, "damaged", id="cut off"),
        pytest.param(lambda m: rewrite(m.root / PART_1_1, lambda d: d + b"\0"), 1, PART_1_1, "", id="too long"),
        pytest.param(lambda m: (m.root / PART_1_1).unlink(), 1, PART_1_1, "", id="part missing"),
        pytest.param(lambda m: rewrite(m.root / COMMIT_2, flip(20)), 2, COMMIT_2, "", id="flipped commit"),
        pytest.param(lambda m: rewrite(m.root / COMMIT_2, lambda d: d[:40]), 2, COMMIT_2, "", id="commit cut off"),
        pytest.param(lambda m: (m.root / COMMIT_2).unlink(), 2, COMMIT_2, "no commit of version 2", id="commit gone"),
    ],
)
def test_damage_is_named_once(
    maker: StreamMaker,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[StreamMaker], object],
    version: int,
    key: str,
    message: str,
) -> None:
    damage(maker)
    record = verify(capsys, maker)
    assert [(problem["version"], problem["key"]) for problem in record["problems"]] == [(version, key)]
    assert message in record["problems"][0]["message"]
    assert record["unproved"] == list(range(version + 1, 4))  # whole, but from an unknown state


def test_an_anchor_makes_later_versions_provable_again(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.anchor()
    maker.publish({"b.bias": {0: 1}})
    rewrite(maker.root / PART_2_0, flip(-1))
    record = verify(capsys, maker)
    assert [problem["version"] for problem in record["problems"]] == [2]
    assert record["unproved"] == [3]


def test_two_broken_objects_are_both_named(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(maker.root / PART_1_1, flip(-1))
    rewrite(maker.root / PART_2_0, flip(-1))
    assert [problem["key"] for problem in verify(capsys, maker)["problems"]] == [PART_1_1, PART_2_0]


def test_a_wrong_state_hash(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.publish({"b.bias": {0: 1}}, state_sha256="ab" * 32)
    (problem,) = verify(capsys, maker)["problems"]
    assert problem["key"] == COMMIT_4
    assert f"it says {'ab' * 32}" in problem["message"]


def test_a_fork(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.publish({"b.bias": {0: 1}}, parent_sha256="cd" * 32)
    (problem,) = verify(capsys, maker)["problems"]
    assert problem["key"] == COMMIT_4
    assert "history" in problem["message"]


def test_a_commit_of_a_foreign_stream(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.publish({}, stream_id="f" * 32)
    (problem,) = verify(capsys, maker)["problems"]
    assert (problem["version"], problem["key"]) == (4, COMMIT_4)
    assert "belongs to stream " + "f" * 32 in problem["message"]


def test_parts_that_set_one_element_twice(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    commit = maker.publish({"a.weight": {0: 5}})
    (ref,) = commit.parts
    frame = Frame("coo", (Slice(0, Box((1, 0), (1, 8)), 1, Digest.ZERO),))
    header = PartHeader(stream_id=commit.stream_id, version=4, rank=1, seq=0)
    payload = {"coo.index.u32": bytes(4), "coo.value.BF16": bytes(2)}
    data = b"".join(bytes(p) for p in encode_part(header, [frame], [payload], schema=maker.stream.load()[1]))
    key = part_key(4, 1, 0, NONCE)
    maker.store.put_new(key, data)
    other = replace(ref, key=key, stored_bytes=len(data), sha256=sha256_hex(data), rank=1, num_slices=1, num_changed=1)
    forged = replace(commit, parts=(ref, other), num_changed=2)
    rewrite(maker.root / COMMIT_4, lambda _: forged.to_bytes())
    (problem,) = verify(capsys, maker)["problems"]
    assert (problem["version"], problem["key"]) == (4, COMMIT_4)
    assert "a.weight" in problem["message"]
    assert "overlap" in problem["message"]


def test_a_damaged_anchor(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = maker.anchor()
    rewrite(maker.root / manifest.files[0].key, flip(-1))
    (problem,) = verify(capsys, maker)["problems"]
    assert (problem["version"], problem["key"]) == (3, manifest.key)


def test_an_anchor_of_another_state(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = maker.anchor(state=base_state())
    (problem,) = verify(capsys, maker)["problems"]
    assert (problem["version"], problem["key"]) == (3, manifest.key)
    assert "digests are not those of version 3" in problem["message"]


def test_a_hint_beyond_the_last_commit_means_a_lost_commit(
    maker: StreamMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    (maker.root / "commits/00000000000000000003.json").unlink()
    (problem,) = verify(capsys, maker)["problems"]
    assert (problem["version"], problem["key"]) == (3, "head.json")


@pytest.mark.parametrize("content", [b"nonsense", seal({"format_version": [1, 0]})])
def test_a_damaged_or_missing_hint_is_allowed(
    maker: StreamMaker, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    rewrite(maker.root / "head.json", lambda _: content)
    assert verify(capsys, maker)["ok"]
    (maker.root / "head.json").unlink()
    assert verify(capsys, maker)["ok"]


def test_parts_of_no_version_are_counted_and_harmless(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    maker.store.put_new(part_key(4, 0, 0, NONCE), b"left by a dead rank")
    record = verify(capsys, maker)
    assert record["ok"]
    assert (record["num_unreferenced"], record["unreferenced_bytes"]) == (1, len(b"left by a dead rank"))


def test_a_damaged_identity_ends_it(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(maker.root / "stream.json", flip(30))
    assert main(["verify", str(maker.root), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "FormatError"


def test_a_plain_checkpoint_folder_is_recognised(
    maker: StreamMaker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", maker.state)
    got = verify(capsys, maker, "--checkpoint", str(folder))
    assert got["ok"]
    # Version 3 changed nothing, so the weights are those of 2 as well: the newest is named.
    assert (got["checkpoint"]["version"], got["checkpoint"]["claimed_version"]) == (3, None)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors"]  # only read
    base = write_checkpoint(tmp_path / "base", base_state())
    assert verify(capsys, maker, "--checkpoint", str(base))["checkpoint"]["version"] == 0


def test_a_checkpoint_with_a_flipped_bit_names_the_tensor(
    maker: StreamMaker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = {name: list(words) for name, words in maker.state.items()}
    state["b.bias"][1] ^= 1
    folder = write_checkpoint(tmp_path / "checkpoint", state)
    got = verify(capsys, maker, "--checkpoint", str(folder))["checkpoint"]
    assert (got["version"], got["compared_with"], got["differences"]) == (None, 3, ["b.bias: other bits"])
    assert main(["verify", str(maker.root), "--checkpoint", str(folder)]) == 1
    assert "is no version of this stream, compared with version 3:\n  b.bias: other bits" in capsys.readouterr().out


def test_a_checkpoint_with_other_tensors(
    maker: StreamMaker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    header = b'{"z":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    differences = verify(capsys, maker, "--checkpoint", str(folder))["checkpoint"]["differences"]
    assert [text.split(":")[0] for text in differences] == ["a.weight", "b.bias", "z"]


def test_a_quick_look_reads_no_part_and_sees_what_is_missing_or_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = three_versions(tmp_path / "stream")
    part = maker.stream.commit(2).commit.parts[0].key
    record = verify(capsys, maker, "--quick")
    assert (record["ok"], record["full"], record["unproved"], record["num_unreferenced"]) == (True, False, [1, 2, 3], 0)
    assert record["checked_bytes"] == 0
    data = (maker.root / part).read_bytes()
    (maker.root / part).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert verify(capsys, maker, "--quick")["ok"]
    assert not verify(capsys, maker, "--full")["ok"], "only who reads the bytes can know"
    (maker.root / part).write_bytes(data[:-1])
    assert [problem["key"] for problem in verify(capsys, maker, "--quick")["problems"]] == [part]
    (maker.root / part).unlink()
    assert [problem["version"] for problem in verify(capsys, maker, "--quick")["problems"]] == [2]
