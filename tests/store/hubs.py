"""The local Hub of the bucket tests, once per session; each test gets a bucket of its own."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def hub_home(tmp_path_factory):
    """Where huggingface_hub and hf-xet keep tokens, caches and logs; before either is imported."""
    if importlib.util.find_spec("hf_xet") is None:
        pytest.skip("needs hf-xet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf-home")))
        yield


@pytest.fixture(scope="session")
def running_hub(hub_home):
    for name in ("aiohttp", "lz4.frame"):
        pytest.importorskip(name)
    from tests.store.fake_hub import FakeHub

    with FakeHub() as hub:
        yield hub


@pytest.fixture
def hub(running_hub, monkeypatch, tmp_path):
    running_hub.reset()
    use_hub(monkeypatch, tmp_path, running_hub.port)
    yield running_hub
    running_hub.reset()


@pytest.fixture
def hub_url(hub):
    bucket = f"tester/run-{next(_numbers)}"
    hub.buckets[bucket] = {}
    return f"hf://buckets/{bucket}/nested/run"


def use_hub(monkeypatch, folder, port: int) -> None:
    """Exactly these settings, whatever the shell of the developer says."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_TOKEN", "hf_dummy")
    monkeypatch.setenv("HF_HOME", str(folder / "hf-home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def split(url: str) -> tuple[str, str]:
    """Bucket and prefix of a store's URL."""
    owner, name, prefix = url.removeprefix("hf://buckets/").split("/", 2)
    return f"{owner}/{name}", prefix


def raw_put(hub, url: str, key: str, data: bytes) -> None:
    bucket, prefix = split(url)
    hub.raw_put(bucket, f"{prefix}/{key}", data)


def raw_get(hub, url: str, key: str) -> bytes | None:
    bucket, prefix = split(url)
    return hub.raw_get(bucket, f"{prefix}/{key}")
