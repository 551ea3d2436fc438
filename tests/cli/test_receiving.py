"""`pull` and `follow`: the folder they leave, what they report, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.streams import STREAM_ID, StreamMaker, base_state, checkpoint_bytes, three_versions, write_checkpoint
from torch_delta.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def maker(tmp_path: Path) -> StreamMaker:
    return three_versions(tmp_path / "stream")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "base", base_state())
    (folder / "config.json").write_text("{}")
    return folder


def records(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_pull_builds_the_newest_version(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base), "--json"]) == 0
    *steps, last = records(capsys)
    assert [(step["version"], step["from_version"], step["kind"]) for step in steps][-1][0] == 3
    assert last == {"path": str(copy), "version": 3, "verified_bytes": 76}
    assert weights(copy) == checkpoint_bytes(maker.state)
    assert (copy / "config.json").read_text() == "{}"
    assert weights(base) == checkpoint_bytes(base_state())
    # A second pull finds nothing to do and proves the same bytes.
    assert main(["pull", str(maker.root), str(copy), "--json"]) == 0
    assert records(capsys) == [last]


def test_pull_of_one_version_and_then_of_the_next(maker: StreamMaker, base: Path, tmp_path: Path) -> None:
    copy, state = tmp_path / "copy", base_state()
    assert main(["pull", str(maker.root), str(copy), "--base", str(base), "--version", "1"]) == 0
    state["a.weight"][0], state["a.weight"][31], state["b.bias"][2] = 7, 8, 9
    assert weights(copy) == checkpoint_bytes(state)
    assert main(["pull", str(maker.root), str(copy), "--version", "2"]) == 0
    state["a.weight"][1] = 0x8000
    assert weights(copy) == checkpoint_bytes(state)


def test_pull_without_a_base_starts_from_an_anchor(
    maker: StreamMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker.anchor()
    maker.publish({"b.bias": {0: 1}})
    assert main(["pull", str(maker.root), str(tmp_path / "copy"), "--json"]) == 0
    assert [record.get("kind") for record in records(capsys)] == ["anchor", "delta", None]
    assert main(["verify", str(maker.root), "--checkpoint", str(tmp_path / "copy"), "--json"]) == 0
    got = records(capsys)[0]["checkpoint"]
    assert (got["claimed_version"], got["version"], got["differences"]) == (4, 4, [])


def test_pull_as_lines(maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base), "--version", "1"]) == 0
    headings, *rows, last = capsys.readouterr().out.splitlines()
    assert headings.split()[:4] == ["version", "from", "by", "changed"]
    assert rows[-1].split()[0] == "1"
    assert last == f"{copy} is version 1, 76 B verified"


def test_pull_of_a_version_that_does_not_exist_changes_nothing(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base), "--version", "9"]) == 1
    said = capsys.readouterr().err
    assert "has no version 9 yet, its newest is 3; `torch-delta follow --until 9` waits for it" in said
    assert "(resync: start again from an anchor or a fresh copy of the base)" in said
    assert not copy.exists()


def test_pull_with_a_wrong_base_names_the_tensor(
    maker: StreamMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = base_state()
    state["b.bias"][0] ^= 1
    wrong = write_checkpoint(tmp_path / "wrong", state)
    assert main(["pull", str(maker.root), str(tmp_path / "copy"), "--base", str(wrong), "--json"]) == 1
    error = records(capsys)[-1]["error"]
    assert error["type"] == "BaseMismatch"
    assert "b.bias" in error["message"]


def test_verify_of_a_followed_folder_whose_bytes_rotted(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base)]) == 0
    data = bytearray(weights(copy))
    data[-1] ^= 1  # the last element of a.weight
    (copy / "model.safetensors").write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(maker.root), "--checkpoint", str(copy), "--json"]) == 1
    got = records(capsys)[0]["checkpoint"]
    assert (got["claimed_version"], got["version"], got["compared_with"]) == (3, None, 3)
    assert got["differences"] == ["a.weight: other bits"]


def test_verify_refuses_a_folder_that_follows_another_stream(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base)]) == 0
    (maker.root / "stream.json").rename(tmp_path / "away")
    capsys.readouterr()
    other = StreamMaker(tmp_path / "other", stream_id="f" * 32)
    assert main(["verify", str(other.root), "--checkpoint", str(copy), "--json"]) == 1
    error = records(capsys)[0]["error"]
    assert (error["type"], STREAM_ID in error["message"]) == ("BaseMismatch", True)


def test_follow_runs_a_command_after_each_version(maker: StreamMaker, base: Path, tmp_path: Path) -> None:
    copy, notes = tmp_path / "copy", tmp_path / "notes"
    hook = (
        f'echo "$TORCH_DELTA_VERSION $(cmp -s "$TORCH_DELTA_PATH/model.safetensors" {notes}.bin; echo $?)" >> {notes}'
    )
    (tmp_path / "notes.bin").write_bytes(checkpoint_bytes(maker.state))
    argv = ["follow", str(maker.root), str(copy), "--base", str(base), "--until", "3", "--exec", hook]
    assert main(argv) == 0
    *_, last = notes.read_text().splitlines()
    assert last == "3 0"  # the folder held version 3 while the command ran
    assert weights(copy) == checkpoint_bytes(maker.state)


def test_follow_stops_when_the_command_fails(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["follow", str(maker.root), str(tmp_path / "copy"), "--base", str(base), "--exec", "exit 7", "--json"]
    assert main(argv) == 1
    *_, last = records(capsys)
    assert "ended with status 7 after version" in last["error"]["message"]


def test_what_the_command_prints_stays_out_of_the_json(maker: StreamMaker, base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_delta.cli", "follow", str(maker.root), str(tmp_path / "copy")]
    command += ["--base", str(base), "--until", "3", "--exec", "echo noise", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert [json.loads(line)["version"] for line in done.stdout.splitlines()][-1] == 3
    assert "noise" in done.stderr


def test_follow_ends_quietly_when_it_is_interrupted(maker: StreamMaker, base: Path, tmp_path: Path) -> None:
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it\n"
        "from torch_delta.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "follow", str(maker.root), str(tmp_path / "copy"), "--base", str(base)]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(json.loads(line)["version"] == 3 for line in process.stdout)
            process.send_signal(signal.SIGINT)  # while it waits for version 4
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")
    assert weights(tmp_path / "copy") == checkpoint_bytes(maker.state)


def test_follow_gives_up_after_its_timeout(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["follow", str(maker.root), str(tmp_path / "copy"), "--base", str(base), "--timeout", "0.2", "--json"]
    assert main(argv) == 1
    *steps, last = records(capsys)
    assert steps[-1]["version"] == 3
    assert last["error"]["type"] == "DeadlineExceeded"
    assert weights(tmp_path / "copy") == checkpoint_bytes(maker.state)


def test_an_anchor_is_made_from_a_folder_that_follows(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # rules A1, A2: off the trainer; then a newcomer needs no base
    copy, other = tmp_path / "copy", tmp_path / "other"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base), "--version", "2"]) == 0
    capsys.readouterr()
    assert main(["anchor", str(maker.root), str(copy), "--json"]) == 0
    (record,) = records(capsys)
    assert (record["version"], record["num_files"]) == (2, 2)
    assert main(["verify", str(maker.root), "--json"]) == 0
    assert records(capsys)[0]["anchors"] == [2]
    assert main(["pull", str(maker.root), str(other), "--json"]) == 0
    assert [step["kind"] for step in records(capsys)[:-1]] == ["anchor", "delta"]
    assert weights(other) == checkpoint_bytes(maker.state)
    assert (other / "config.json").read_text() == "{}"


def test_no_anchor_is_made_of_bytes_that_are_no_version(
    maker: StreamMaker, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # F14: somebody else wrote to the folder
    copy = tmp_path / "copy"
    assert main(["pull", str(maker.root), str(copy), "--base", str(base)]) == 0
    data = weights(copy)
    (copy / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["anchor", str(maker.root), str(copy)]) == 1
    assert "DigestMismatch" in capsys.readouterr().err
    other = StreamMaker(tmp_path / "another", stream_id="f" * 32)
    assert main(["anchor", str(other.root), str(copy)]) == 1
    assert "BaseMismatch" in capsys.readouterr().err
    assert not (maker.root / "anchors").exists()
