"""Progress bars: there on a terminal for everything that may take long, and nowhere else."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.cli.streams import NONCE, StreamMaker, base_state, three_versions, write_checkpoint
from torch_delta.cli.metered import Metered
from torch_delta.format.keys import part_key
from torch_delta.store import open_store
from torch_delta.testing import StoreSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def maker(tmp_path: Path) -> StreamMaker:
    made = three_versions(tmp_path / "stream")
    made.anchor()
    return made


def on_a_terminal(*argv: object, both: bool = False) -> tuple[str, str]:
    """Run a command whose stderr, or both streams, are a terminal; (stdout, stderr) as text."""
    leader, follower = pty.openpty()
    shown = bytearray()

    def listen() -> None:
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # Linux's way to say that nobody holds the other end
                return
            if not piece:
                return
            shown.extend(piece)

    thread = threading.Thread(target=listen)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_delta.cli", *map(str, argv)],
        stdout=follower if both else subprocess.PIPE,
        stderr=follower,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"},
    )
    os.close(follower)
    thread.start()
    try:
        out, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
        thread.join(20)
        os.close(leader)
    assert process.returncode == 0, shown.decode()
    return out or "", shown.decode()


def fetched(size_bytes: int) -> str:
    """What a bar without an end shows, as a pattern."""
    return rf"{size_bytes}/\? bytes" if size_bytes < 1024 else rf"{size_bytes / 1024:.1f}/\? KiB"


def test_pull_shows_what_it_fetches_and_what_it_verifies(maker: StreamMaker, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", base_state())
    out, shown = on_a_terminal("pull", maker.root, tmp_path / "copy", "--base", base)
    for version in (1, 2):
        size_bytes = sum(path.stat().st_size for path in (maker.root / "parts" / f"{version:020d}").iterdir())
        assert re.search(rf"following .* {fetched(size_bytes)}", shown), shown
    assert re.search(r"verifying every byte .* 76/76 bytes", shown)
    assert "\x1b" not in out  # tables stay readable in a pipe
    assert out.splitlines()[-1] == f"{tmp_path / 'copy'} is version 3, 76 B verified"


def test_an_anchor_is_counted_too(maker: StreamMaker, tmp_path: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in (maker.root / "anchors").rglob("*.safetensors"))
    _, shown = on_a_terminal("follow", maker.root, tmp_path / "copy", "--until", 3)
    assert re.search(rf"following .* {fetched(size_bytes)}", shown), shown


def test_bar_and_table_do_not_meet_on_one_terminal(maker: StreamMaker, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", base_state())
    _, shown = on_a_terminal("pull", maker.root, tmp_path / "copy", "--base", base, both=True)
    rows = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1] for line in shown.split("\r\n")]
    assert [row.split()[0] for row in rows if re.match(r" +\d", row)][-1] == "3"
    assert rows[-2] == f"{tmp_path / 'copy'} is version 3, 76 B verified"


@pytest.mark.parametrize(
    ("command", "task"),
    [
        (("verify",), "reading the stream"),
        (("gc",), "deleting"),
        (("anchor", "copy"), "uploading the anchor"),
        (("verify", "--checkpoint", "copy"), "digesting the checkpoint"),
    ],
)
def test_other_long_work(maker: StreamMaker, tmp_path: Path, command: tuple[str, ...], task: str) -> None:
    on_a_terminal("pull", maker.root, tmp_path / "copy")
    words = [str(tmp_path / word) if word == "copy" else word for word in command]
    _, shown = on_a_terminal(words[0], maker.root, *words[1:])
    assert re.search(rf"{task} .*\d", shown), shown


def test_programs_see_no_bars(maker: StreamMaker, tmp_path: Path) -> None:
    out, shown = on_a_terminal("pull", maker.root, tmp_path / "copy", "--json")
    assert shown == ""
    assert [json.loads(line)["version"] for line in out.splitlines()] == [3, 3]


def test_a_pipe_sees_no_bars(maker: StreamMaker, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_delta.cli", "pull", maker.root, tmp_path / "copy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


class TestMetered(StoreSuite):
    """A metered store is a store like the one inside."""

    big_bytes = 1 << 20

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Metered]:
        self.root = tmp_path / "store"
        with Metered(open_store(self.root)) as store:
            yield store

    def raw_put(self, store: Metered, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, store: Metered, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None


def test_only_weights_are_counted_and_only_while_somebody_listens(maker: StreamMaker) -> None:
    store, told = Metered(maker.store), []
    key = part_key(1, 0, 0, NONCE)
    store.get(key)
    with store.telling(told.append):
        size_bytes = len(store.get(key))
        store.get("stream.json")
        store.get_range(key, 3, 5)
        store.sibling(maker.root.name).get_range(key, 0, 7)
    store.get(key)
    assert told == [size_bytes, 5, 7]
