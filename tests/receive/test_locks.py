"""Locks between processes and threads of one host."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import CheckpointBusy, DeadlineExceeded, StoreUnavailable
from torch_delta.receive.access import exclusive, share
from torch_delta.receive.consumers import Consumer, oldest_needed
from torch_delta.receive.locks import FileLock
from torch_delta.receive.state import Layout

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "checkpoint")
    layout.hidden.mkdir(parents=True)
    return layout


def lock(layout: Layout, purpose: str = "test") -> FileLock:
    return FileLock(layout.writer_lock, purpose)


HOLDER = """
import sys
from pathlib import Path
from torch_delta.receive.locks import FileLock
lock = FileLock(Path(sys.argv[1]), "hold it for the test")
lock.acquire(exclusive=sys.argv[2] == "exclusive", timeout_s=10)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(layout: Layout):
    """Another process that holds the writer lock until its standard input closes."""
    started = []

    def start(mode: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(layout.writer_lock), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.stdin.close()
        process.stdout.close()
        process.wait(timeout=30)


def test_a_second_holder_is_told_who_the_first_is(layout: Layout) -> None:
    first, second = lock(layout, "download version 7"), lock(layout)
    first.acquire(exclusive=True, timeout_s=0)
    with pytest.raises(CheckpointBusy, match="download version 7") as caught:
        second.acquire(exclusive=True, timeout_s=0)
    assert f"process {os.getpid()}" in caught.value.holder
    first.release()
    second.acquire(exclusive=True, timeout_s=0)
    second.release()


def test_a_wait_ends_at_its_deadline_and_names_the_other_process(layout: Layout, holder) -> None:
    process = holder("exclusive")
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s to read") as caught:
        lock(layout, "read").acquire(exclusive=False, timeout_s=0.05)
    assert isinstance(caught.value.__cause__, CheckpointBusy)
    assert f"process {process.pid} " in caught.value.peer


def test_a_shared_holder_is_named_too(layout: Layout, holder) -> None:
    process = holder("shared")
    with pytest.raises(CheckpointBusy) as caught:
        lock(layout).acquire(exclusive=True, timeout_s=0)
    assert str(process.pid) in caught.value.holder


def test_a_killed_holder_holds_nothing(layout: Layout, holder) -> None:
    process = holder("exclusive")
    process.kill()
    process.wait(timeout=30)
    mine = lock(layout)
    mine.acquire(exclusive=True, timeout_s=10)
    mine.release()


def test_a_forked_child_does_not_keep_its_parents_lock(layout: Layout) -> None:
    # F79: workers started by fork inherit open files.
    mine = lock(layout)
    mine.acquire(exclusive=True, timeout_s=0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # lives until the parent closes the pipe
        os._exit(0 if not mine.held else 1)
    os.close(read_end)
    os.close(mine._fd)  # as a killed parent would: no unlock, only its descriptor goes
    mine._fd = None
    other = lock(layout)
    try:
        other.acquire(exclusive=True, timeout_s=10)
        other.release()
    finally:
        os.close(write_end)
        assert os.waitpid(child, 0)[1] == 0


def test_a_waiting_writer_is_not_starved_by_new_readers(layout: Layout) -> None:
    reader = share(layout, 0)
    entered = threading.Event()
    writer = threading.Thread(target=lambda: (exclusive_once(layout), entered.set()))
    writer.start()
    try:
        # The writer holds the turnstile now or soon; from then on no reader gets in while the first one stays.
        with pytest.raises(CheckpointBusy):
            come_and_go_until_refused(layout)
        assert not entered.is_set()
    finally:
        reader.release()
        writer.join(timeout=30)
    assert entered.is_set()


def come_and_go_until_refused(layout: Layout) -> None:
    while True:
        share(layout, 0).release()


def exclusive_once(layout: Layout) -> None:
    with exclusive(layout, 30):
        pass


def test_read_only_folders_can_be_read(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    share(layout, 0).release()
    real = os.open

    def refuse_writing(path, flags, *rest, **named):
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse_writing)
    share(layout, 0).release()
    with pytest.raises(StoreUnavailable, match="read-only"):
        FileLock(layout.hidden / "never-made.lock", "test").acquire(exclusive=False, timeout_s=0)


def test_consumers_pin_until_they_say_so_close_or_die(layout: Layout, tmp_path: Path) -> None:
    folder = layout.consumers
    assert oldest_needed(folder) is None
    with Consumer(folder, "engine-0", 3) as first:
        second = Consumer(folder, "engine-1", 5)
        assert oldest_needed(folder) == 3
        first.applied(6)
        assert oldest_needed(folder) == 5
        # dies without closing: only its descriptor goes, the file stays
        os.close(second._lock._fd)
        second._lock._fd = None
        assert oldest_needed(folder) == 6
        assert not (folder / "engine-1.version").exists()
    assert oldest_needed(folder) is None


@pytest.mark.parametrize("bad", ["", "../engine", "a/b", ".hidden", "x" * 129, "nul\0"])
def test_a_consumer_id_is_a_plain_name(layout: Layout, bad: str) -> None:
    with pytest.raises(ValueError, match="consumer id"):
        Consumer(layout.consumers, bad, 0)
