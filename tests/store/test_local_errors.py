"""The directory store when the file system says no: facts, outcomes, and a store that works again afterwards."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.store.samples import COMMIT, failing
from torch_delta.errors import ObjectNotFound, StoreUnavailable
from torch_delta.store import Created, LocalStore


@pytest.mark.parametrize(
    ("name", "code", "outcome", "words"),
    [
        ("write", errno.ENOSPC, "absent", "disk is full"),
        ("write", errno.EDQUOT, "absent", "quota"),
        ("fsync", errno.ENOSPC, "absent", "disk is full"),  # NFS reports a full disk only here
        ("fsync", errno.EIO, "absent", "EIO"),
        ("link", errno.ENOSPC, "absent", "disk is full"),
        ("link", errno.EIO, "unknown", "EIO"),
        ("link", errno.ESTALE, "unknown", "network file system"),
        ("mkdir", errno.EROFS, "absent", "read-only"),
        ("open", errno.EMFILE, "absent", "EMFILE"),
    ],
)
def test_a_failed_put_says_what_is_known_and_leaves_nothing(
    store, root, monkeypatch, name, code, outcome, words
) -> None:
    root.mkdir()
    nth = 2 if name == "fsync" else 1  # the first fsync is that of the new directory's entry
    with monkeypatch.context() as patch:
        failing(patch, name, code, nth=nth)
        with pytest.raises(StoreUnavailable, match=words) as caught:
            store.put_new(COMMIT, b"x" * 100)
    facts = caught.value.facts
    assert (facts["key"], facts["url"], facts["outcome"], facts["errno"]) == (COMMIT, store.url, outcome, code)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.action == "retry"
    assert [path for path in root.rglob("*") if path.is_file()] == []
    store.put_new(COMMIT, b"y")  # and the store works again
    assert store.get(COMMIT) == b"y"


def test_a_directory_sync_that_fails_after_the_name_is_made_is_an_unknown_outcome(store, root, monkeypatch) -> None:
    (root / "commits").mkdir(parents=True)
    with monkeypatch.context() as patch:
        failing(patch, "fsync", errno.EIO, nth=3)  # entry of commits/, the file, the directory
        with pytest.raises(StoreUnavailable) as caught:
            store.put_new(COMMIT, b"x")
    assert caught.value.facts["outcome"] == "unknown"
    assert store.create_or_same(COMMIT, b"x") is Created.SAME


def test_a_really_full_disk(tmp_path) -> None:
    """A file-size limit gives the same short writes and errors as a full disk, in this process, without root."""
    store = LocalStore(tmp_path, fsync=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StoreUnavailable, match="EFBIG"):
            store.put_new(COMMIT, [bytes(700_000)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


READ_ONLY = """
import os, sys
from torch_delta.errors import StoreUnavailable
from torch_delta.store import LocalStore
store = LocalStore(sys.argv[1])
if os.getuid() == 0:  # root may write anywhere; become somebody who may not, once everything is imported
    os.setgid(65534)
    os.setuid(65534)
COMMIT = "commits/00000000000000000001.json"
assert store.get(COMMIT) == b"x"
for call in (lambda: store.put_new("commits/2.json", b""), lambda: store.put_new("head.json", b""),
             lambda: store.put_hint("head.json", b""), lambda: store.delete(COMMIT),
             lambda: store.put_new("new/folder", b"")):
    try:
        call()
    except StoreUnavailable as error:
        assert "Permission denied" in str(error) and error.outcome == "absent", error
    else:
        raise SystemExit("a read-only directory was written to")
print("refused")
"""


def test_a_read_only_directory() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        root = Path(name)
        LocalStore(root).put_new(COMMIT, b"x")
        for folder in (root, root / "commits"):
            folder.chmod(0o555)
        try:
            run = subprocess.run(
                [sys.executable, "-c", READ_ONLY, name], capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            for folder in (root, root / "commits"):
                folder.chmod(0o755)
    assert run.stdout == "refused\n", run.stderr


def test_cannot_list_is_not_empty(store, root, monkeypatch) -> None:
    store.put_new(COMMIT, b"x")
    for code in (errno.EACCES, errno.EIO, errno.ESTALE):
        with monkeypatch.context() as patch:
            failing(patch, "scandir", code)
            with pytest.raises(StoreUnavailable) as caught:  # F78
                [*store.list("commits/")]
        assert caught.value.facts["errno"] == code


def test_a_root_that_is_a_file_is_unavailable_not_empty(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / "file")
    for call in (lambda: store.get(COMMIT), lambda: [*store.list()], lambda: store.put_new(COMMIT, b"")):
        with pytest.raises(StoreUnavailable, match="A file lies where a directory must be"):
            call()


def test_a_file_where_a_folder_must_be(store, root) -> None:
    root.mkdir()
    (root / "commits").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="A file lies where a directory must be"):
        store.put_new(COMMIT, b"")
    with pytest.raises(ObjectNotFound):
        store.get(COMMIT)
    store.delete(COMMIT)
