"""The directory store: the conformance suite, durability, and what lies in the directory besides objects."""

from __future__ import annotations

import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.samples import COMMIT, failing, temporaries
from torch_delta.errors import ObjectExists, ObjectNotFound, StoreUnavailable
from torch_delta.store import Created, LocalStore, posix
from torch_delta.testing import StoreSuite


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        with LocalStore(tmp_path / "made" / "at first put", fsync=False) as store:
            yield store

    def raw_put(self, store, key, data):
        path = Path(store._root, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, store, key):
        path = Path(store._root, key)
        return path.read_bytes() if path.is_file() else None


class TestLocalStoreWithoutLinks(TestLocalStore):
    """The same on a file system that knows no hard links (FUSE, SMB, vfat)."""

    @pytest.fixture(autouse=True)
    def no_links(self, monkeypatch):
        def refuse(*args, **kwargs):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)


# Durability


def test_the_order_of_one_put_is_file_then_name_then_directory(root, monkeypatch) -> None:
    root.mkdir()
    events = []
    for name in ("fsync", "link", "unlink", "mkdir"):
        real = getattr(os, name)

        def recorded(*args, real=real, name=name, **kwargs):
            if name == "fsync":
                path = Path(f"/proc/self/fd/{args[0]}").readlink()
                events.append("fsync temporary" if path.name.startswith(".tmp-") else f"fsync {path.name}")
            else:
                events.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, recorded)
    store = LocalStore(root)
    store.put_new(COMMIT, b"x")
    made = ["mkdir", "fsync root"]  # the new directory's entry is durable before anything is put in it
    put = ["fsync temporary", "link", "unlink", "fsync commits"]
    assert events == [*made, *put]
    events.clear()
    store.put_new("commits/00000000000000000002.json", b"x")
    assert [event for event in events if event != "mkdir"] == put
    events.clear()
    store.delete(COMMIT)
    assert events == ["unlink", "fsync commits"]
    events.clear()
    LocalStore(root, fsync=False).put_new("commits/00000000000000000003.json", b"x")
    assert [event for event in events if event.startswith("fsync")] == []


def test_the_entry_of_a_directory_somebody_else_made_is_synced_too(root, monkeypatch) -> None:
    (root / "commits").mkdir(parents=True)
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(Path(f"/proc/self/fd/{file}").readlink()), real(file)))
    LocalStore(root).put_new(COMMIT, b"x")
    assert root in synced


def test_an_object_found_after_a_lost_reply_is_made_durable(store, root, monkeypatch) -> None:
    store.put_new(COMMIT, b"x")
    calls = failing(monkeypatch, "fsync", errno.EIO, nth=3)  # file, directory of the loser's temporary is not synced
    assert store.create_or_same(COMMIT, b"x") is Created.SAME
    assert len(calls) == 2  # the loser's temporary file, then the directory of the object that was there


# Links, and what file systems answer


def test_a_link_whose_reply_was_lost_is_ours(store, root, monkeypatch) -> None:
    failing(monkeypatch, "link", errno.EEXIST, after=True)  # what NFS answers to a retransmitted link
    assert store.put_new(COMMIT, b"ours").size_bytes == 4
    assert (root / COMMIT).read_bytes() == b"ours"
    assert temporaries(root) == []


def test_a_link_that_ended_in_an_io_error_but_happened_is_ours(store, root, monkeypatch) -> None:
    failing(monkeypatch, "link", errno.EIO, after=True)
    store.put_new(COMMIT, b"ours")
    assert (root / COMMIT).read_bytes() == b"ours"


def test_neither_links_nor_exclusive_rename_is_refused(store, root, monkeypatch) -> None:
    failing(monkeypatch, "link", errno.ENOTSUP)
    monkeypatch.setattr(posix, "_renameat2", lambda: None)
    with pytest.raises(StoreUnavailable, match="neither link nor rename") as caught:
        store.put_new(COMMIT, b"x")
    assert caught.value.facts["outcome"] == "absent"
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_a_directory_that_cannot_be_synced_is_accepted(store, root, monkeypatch) -> None:
    (root / "commits").mkdir(parents=True)
    real = os.fsync

    def fake(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")  # SMB
        real(file)

    monkeypatch.setattr(os, "fsync", fake)
    store.put_new(COMMIT, b"x")
    assert store.get(COMMIT) == b"x"


# What lies in the directory besides our objects


def test_links_below_the_root_lead_nowhere(store, root, tmp_path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "00000000000000000001.json").write_bytes(b"secret")
    root.mkdir()
    (root / "commits").symlink_to(outside)
    (root / "head.json").symlink_to(outside / "00000000000000000001.json")
    (root / "parts").symlink_to(tmp_path / "nowhere")
    for call in (
        lambda: store.get(COMMIT),
        lambda: store.stat(COMMIT),
        lambda: store.open_local(COMMIT),
        lambda: store.get("head.json"),
        lambda: store.stat("head.json"),
        lambda: store.put_new("commits/2.json", b""),
        lambda: store.put_new("parts/x", b""),
        lambda: store.delete(COMMIT),
        lambda: [*store.list("commits/")],
    ):
        with pytest.raises(StoreUnavailable, match="symbolic link below the root"):
            call()
    assert [*store.list()] == []
    assert (outside / "00000000000000000001.json").read_bytes() == b"secret"
    with pytest.raises(ObjectExists):
        store.put_new("head.json", b"")
    store.put_hint("head.json", b"replaces the link, not its target")
    assert (outside / "00000000000000000001.json").read_bytes() == b"secret"
    assert not (tmp_path / "nowhere").exists()


def test_the_root_itself_may_be_a_link(root, tmp_path) -> None:
    root.mkdir()
    (tmp_path / "alias").symlink_to(root)
    LocalStore(tmp_path / "alias").put_new(COMMIT, b"x")
    assert LocalStore(root).get(COMMIT) == b"x"


def test_foreign_files_are_not_listed_and_a_pipe_does_not_block(store, root) -> None:
    store.put_new(COMMIT, b"x")
    (root / "README.md").write_bytes(b"upper case is no key")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.json").write_bytes(b"")
    (root / "with space").write_bytes(b"")
    os.mkfifo(root / "pipe")
    assert [info.key for info in store.list()] == [COMMIT]
    with pytest.raises(ObjectNotFound):
        store.get("pipe")


def test_a_put_takes_the_mode_of_the_umask(store, root) -> None:
    old = os.umask(0o027)
    try:
        store.put_new(COMMIT, b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((root / COMMIT).stat().st_mode) == 0o640  # a follower of the same group can read it
    assert stat.S_IMODE((root / "commits").stat().st_mode) == 0o750


# Temporary files


def test_temporaries_are_swept_by_age_and_by_the_file_systems_clock(store, root, monkeypatch) -> None:
    store.put_new(COMMIT, b"x")
    folder = root / "parts" / "1"
    folder.mkdir(parents=True)
    for path, age_s in ((root / ".tmp-old", 7200), (folder / ".tmp-old", 3700), (folder / ".tmp-young", 10)):
        path.write_bytes(b"left by a dead process")  # F84
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    monkeypatch.setattr("time.time", lambda: 0.0)  # this host's clock is wrong, and is not asked
    assert [info.key for info in store.list()] == [COMMIT]
    assert store.sweep_temporary(older_than_s=3600.0) == 2
    assert temporaries(root) == [folder / ".tmp-young"]
    assert store.sweep_temporary(older_than_s=3600.0) == 0
    assert store.get(COMMIT) == b"x"


def test_sweeping_a_directory_that_is_not_there(store) -> None:
    assert store.sweep_temporary(older_than_s=0.0) == 0


def test_a_temporary_swept_under_a_live_writer_is_a_failed_put_not_a_lost_object(store, root) -> None:
    def pieces():
        yield b"x"
        for path in temporaries(root):
            path.unlink()
        yield b"y"

    with pytest.raises(StoreUnavailable) as caught:
        store.put_new(COMMIT, pieces())
    assert caught.value.facts["outcome"] == "absent"
    assert not (root / COMMIT).exists()


def test_a_put_leaves_no_descriptor_open(store, root) -> None:
    def broken():
        yield b"x"
        raise KeyboardInterrupt

    store.put_new(COMMIT, b"x")
    num_open = len([*Path("/proc/self/fd").iterdir()])  # F93
    for number in range(5):
        with pytest.raises(KeyboardInterrupt):
            store.put_new(f"parts/{number}", broken())
        with pytest.raises(ObjectExists):
            store.put_new(COMMIT, b"x")
        with pytest.raises(ObjectNotFound):
            store.get("absent/absent")
        next(store.list())  # abandoned
    assert len([*Path("/proc/self/fd").iterdir()]) == num_open


def test_empty_folders_go_with_their_last_object(store, root) -> None:
    store.put_new("parts/1/a", b"")
    store.put_new("parts/1/b", b"")
    store.delete("parts/1/a")
    assert (root / "parts" / "1").is_dir()
    store.delete("parts/1/b")
    assert [*root.rglob("*")] == [root / "parts"]
    store.put_new("parts/1/a", b"again")
    assert store.get("parts/1/a") == b"again"


def test_a_listing_survives_concurrent_deletion(store, root) -> None:
    store = LocalStore(root, fsync=False)
    for number in range(200):
        store.put_new(f"parts/{number:03d}/x", b"")
    started = threading.Event()

    def remove() -> None:
        started.wait(60)
        for number in range(200):
            store.delete(f"parts/{number:03d}/x")

    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(remove)
        listing = store.list()
        next(listing)
        started.set()
        keys = [info.key for info in listing]
        removal.result(60)
    assert keys == sorted(keys)
