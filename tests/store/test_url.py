"""What `open_store` accepts, and how it refuses the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_delta.errors import TorchDeltaError
from torch_delta.store import LocalStore, MemoryStore, open_store


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/../b//c/", "/b/c"),
        ("relative/run", "CWD/relative/run"),
        ("~/run", "HOME/run"),
        ("/a/~/b", "/a/~/b"),
        ("/a/$HOME", "/a/$HOME"),
        ("/with space/%41", "/with space/%41"),
        ("file:///a/b", "/a/b"),
        ("FILE:///a", "/a"),
        ("file://localhost/a", "/a"),
        ("file:///with%20space/%2525", "/with space/%25"),
        ("file:///~/run", "/~/run"),
        (Path("~/run"), "HOME/run"),
        (Path("/a/b"), "/a/b"),
        ("c:/not-a-scheme", "CWD/c:/not-a-scheme"),
    ],
)
def test_directories(url, path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = path.replace("CWD", str(tmp_path)).replace("HOME", "/home/somebody") if "$" not in path else path
    store = open_store(url)
    assert isinstance(store, LocalStore)
    assert str(store._root) == expected
    assert store.url == Path(expected).as_uri()


@pytest.mark.parametrize("name", ["plain", "with space", "100%", "%41", "que?ry#frag", "\u00fcml\u00e4ut", "new\nline"])
def test_a_stores_url_opens_the_same_store(tmp_path, name) -> None:
    store = LocalStore(tmp_path / name, fsync=False)
    store.put_new("head.json", b"x")
    assert open_store(store.url).get("head.json") == b"x"
    assert open_store(tmp_path / name).get("head.json") == b"x"


def test_opening_makes_nothing(tmp_path) -> None:
    open_store(tmp_path / "run")
    open_store(f"file://{tmp_path}/run")
    assert [*tmp_path.iterdir()] == []


def test_memory() -> None:
    assert isinstance(open_store("memory://a/b-c.1"), MemoryStore)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty"),
        ("/a\0b", "NUL"),
        ("http://host/x", "unknown scheme 'http'"),
        ("file://relative/x", "would be a host"),
        ("file://", "absolute/path"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("file:///a%00b", "absolute/path"),
        ("file:/a", "two slashes"),
        ("s3:bucket/run", "two slashes"),
        ("memory://", "expected memory://name"),
        ("memory://a b", "expected memory://name"),
    ],
)
def test_malformed_urls_are_refused_with_the_reason(url, words) -> None:
    with pytest.raises(TorchDeltaError, match=words):
        open_store(url)
