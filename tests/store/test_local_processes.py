"""The directory store under several processes, and processes that are killed at every point of a write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from torch_delta import crashpoints
from torch_delta.errors import ObjectNotFound
from torch_delta.store import Created, LocalStore

if TYPE_CHECKING:
    from pathlib import Path

KEY = "commits/00000000000000000001.json"
CONTENT = bytes(range(256)) * 2048  # 512 KiB, so that a torn write would show

WRITER = f"""
import sys
from torch_delta.store import LocalStore
content = bytes(range(256)) * 2048
store = LocalStore(sys.argv[1])
if sys.argv[2] == "put":
    store.put_new({KEY!r}, [content[:300_000], content[300_000:]])
elif sys.argv[2] == "hint":
    store.put_hint("head.json", content)
else:
    store.delete({KEY!r})
print("done")
"""

RACER = """
import sys
from torch_delta.errors import ObjectExists
from torch_delta.store import LocalStore
store, racer = LocalStore(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for line in sys.stdin:                    # the starting gun of each round
    key = f"commits/{int(line):020d}.json"
    try:
        store.put_new(key, (racer * 50_000).encode())
        print("won", flush=True)
    except ObjectExists:
        print("lost", flush=True)
"""


def run_writer(root: Path, action: str, crash: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, crashpoints.ENVIRONMENT: crash} if crash else dict(os.environ)
    return subprocess.run(
        [sys.executable, "-c", WRITER, str(root), action],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("point", "is_there", "num_temporaries"),
    [
        ("store.temp_created", False, 1),
        ("store.temp_written", False, 1),
        ("store.temp_synced", False, 1),
        ("store.linked", True, 1),
        ("store.temp_removed", True, 0),
        ("store.directory_synced", True, 0),
    ],
)
def test_killed_at_any_point_of_a_put(tmp_path, point, is_there, num_temporaries) -> None:
    killed = run_writer(tmp_path, "put", f"{point}:1:kill")
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr

    store = LocalStore(tmp_path)  # what any other process sees now
    assert [info.key for info in store.list()] == ([KEY] if is_there else [])
    if is_there:
        assert (tmp_path / KEY).read_bytes() == CONTENT  # whole, never torn
    else:
        with pytest.raises(ObjectNotFound):
            store.get(KEY)
    assert len([name for name in files(tmp_path) if ".tmp-" in name]) == num_temporaries

    # The same writer, started again, ends where it would have; the leftovers go with the sweep.
    assert store.create_or_same(KEY, CONTENT) is (Created.SAME if is_there else Created.NEW)
    assert store.sweep_temporary(older_than_s=-60.0) == num_temporaries
    assert files(tmp_path) == [KEY]
    assert (tmp_path / KEY).read_bytes() == CONTENT


@pytest.mark.parametrize(("point", "expected"), [("store.hint_written", b"old"), ("store.hint_renamed", CONTENT)])
def test_killed_while_writing_a_hint(tmp_path, point, expected) -> None:
    LocalStore(tmp_path).put_hint("head.json", b"old")
    killed = run_writer(tmp_path, "hint", f"{point}:1:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "head.json").read_bytes() == expected


def test_killed_while_deleting(tmp_path) -> None:
    store = LocalStore(tmp_path)
    store.put_new(KEY, CONTENT)
    killed = run_writer(tmp_path, "delete", "store.deleted:1:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert files(tmp_path) == []
    store.delete(KEY)


def test_without_a_crash_the_writer_finishes(tmp_path) -> None:
    """The tests above can fail: the same program, unarmed, leaves exactly its object."""
    finished = run_writer(tmp_path, "put", None)
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr
    assert files(tmp_path) == [KEY]


def test_of_eight_processes_exactly_one_creates(tmp_path) -> None:
    num_rounds = 25
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 8
        for version in range(num_rounds):
            for racer in racers:
                racer.stdin.write(f"{version}\n")
                racer.stdin.flush()
            outcomes = [racer.stdout.readline().strip() for racer in racers]
            assert sorted(outcomes) == ["lost"] * 7 + ["won"], outcomes
            stored = (tmp_path / f"commits/{version:020d}.json").read_bytes()
            assert stored == str(outcomes.index("won")).encode() * 50_000
    finally:
        for racer in racers:
            racer.stdin.close()
            racer.stdout.close()
            racer.wait(60)
    assert [racer.returncode for racer in racers] == [0] * 8
    assert files(tmp_path) == [f"commits/{version:020d}.json" for version in range(num_rounds)]


@pytest.mark.slow
def test_killed_at_random_moments_nothing_is_torn(tmp_path) -> None:
    code = f"""
import itertools
from torch_delta.store import LocalStore
store, content = LocalStore({str(tmp_path)!r}), bytes(range(256)) * 2048
print("ready", flush=True)
for number in itertools.count({{start}}):
    store.put_new(f"commits/{{{{number:020d}}}}.json", [content])
    print(number, flush=True)
"""
    num_seen = 0
    for _ in range(25):
        writer = subprocess.Popen(
            [sys.executable, "-c", code.format(start=num_seen)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout.readline() == "ready\n"
        writer.stdout.readline()
        writer.kill()  # wherever it is now: nobody synchronises with it
        acknowledged = [int(line) for line in writer.stdout.read().split() if line]
        writer.stdout.close()
        writer.wait(60)
        listed = [info.key for info in LocalStore(tmp_path).list("commits/")]
        num_seen = len(listed)
        assert listed == [f"commits/{number:020d}.json" for number in range(num_seen)]
        assert all(number < num_seen for number in acknowledged)  # what was acknowledged is there
        assert all((tmp_path / key).read_bytes() == CONTENT for key in listed[-5:])
    assert LocalStore(tmp_path).sweep_temporary(older_than_s=-60.0) >= 0
    assert [name for name in files(tmp_path) if ".tmp-" in name] == []
