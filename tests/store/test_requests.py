"""What a version and a poll cost in requests to a bucket, counted on the wire; docs/stores.md has the same numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.publish.sources import ArraySource, edit, initial, write_checkpoint
from tests.publish.support import config
from tests.store.chaos_proxy import ChaosProxy
from tests.store.servers import s3_environment, use
from torch_delta.errors import DeadlineExceeded
from torch_delta.publish import attach_source
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store import open_store
from torch_delta.stream import Stream

pytestmark = pytest.mark.s3

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "stores.md"
PUBLISH = {"PUT parts": 1, "HEAD successor.json": 1, "PUT commits": 1, "PUT head.json": 1}
FOLLOW = {"HEAD commits": 1, "GET commits": 1, "GET parts": 1}
POLL = {"HEAD commits": 1}
LOOK_AROUND = {"GET successor.json": 1, "GET head.json": 1, "HEAD commits": 2}


@pytest.fixture
def proxy(seaweed, monkeypatch):
    with ChaosProxy(("127.0.0.1", seaweed.port)) as proxy:
        use(monkeypatch, s3_environment(proxy.port))
        yield proxy


def kinds(proxy: ChaosProxy) -> Counter[str]:
    """Requests since the last call, by method and first segment of the key."""
    found: Counter[str] = Counter()
    for line in proxy.requests:
        method, path, _ = line.decode().split(" ")
        key = re.sub(r"^/[^/]+/[^/]+/nested/?", "", path.partition("?")[0])
        found[f"{method} {'(listing)' if 'list-type' in path else key.partition('/')[0]}"] += 1
    proxy.requests.clear()
    return found


def test_requests_per_version_and_per_poll(seaweed, proxy, tmp_path) -> None:
    # F107
    base = write_checkpoint(tmp_path / "base", initial())
    url = seaweed.fresh_url()
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    quick = {"poll_interval_s": 0.01, "most_poll_interval_s": 0.01}
    with (
        attach_source(ArraySource(), url, base=base, config=config(anchor_first=False)) as publisher,
        Follower(url, **quick) as follower,
    ):
        reports = follower.apply_to(checkpoint, timeout_s=60)
        for seed in (1, 2, 3):
            kinds(proxy)
            edit(publisher._source, seed)
            publisher.publish()
            publisher.wait()
            publishing = kinds(proxy)
            assert next(reports).version == seed
            following = kinds(proxy)
            if seed > 1:  # the first reads stream.json, the schema and the hint as well, once
                assert publishing == PUBLISH
                polls = following - Counter(FOLLOW)
                assert following & Counter(FOLLOW) == FOLLOW
                assert set(polls) <= {*POLL, *LOOK_AROUND}
        reports.close()
        with open_store(url) as store:
            stream = Stream(store)
            assert stream.head() == 3
            kinds(proxy)
            for _ in range(10):
                assert stream.head(3) == 3
            assert kinds(proxy) == Counter({kind: 10 * number for kind, number in POLL.items()})


def test_a_follower_that_waits_costs_one_small_request_per_poll(seaweed, proxy, tmp_path) -> None:
    # F107; every 16th poll looks for a successor and at the hint as well
    base = write_checkpoint(tmp_path / "base", initial())
    url = seaweed.fresh_url()
    with attach_source(ArraySource(), url, base=base, config=config(anchor_first=False)) as publisher:
        edit(publisher._source, 1)
        publisher.publish()
        publisher.wait()
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    with Follower(url, poll_interval_s=0.005, most_poll_interval_s=0.005) as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=60))
        kinds(proxy)
        with pytest.raises(DeadlineExceeded):
            list(follower.apply_to(checkpoint, timeout_s=3))
    found = kinds(proxy)
    assert set(found) <= {*POLL, *LOOK_AROUND}
    num_rounds = found["GET successor.json"]
    assert num_rounds >= 1
    assert found["GET head.json"] == num_rounds
    num_polls = found["HEAD commits"] - num_rounds * (LOOK_AROUND["HEAD commits"] - 1)
    assert 16 * (num_rounds - 1) < num_polls <= 16 * num_rounds, "one look around for sixteen polls"


def test_the_document_says_the_same() -> None:
    rows = dict(re.findall(r"^\| ([a-z0-9 ,]+) \| (`.*) \|$", DOCUMENT.read_text(), re.MULTILINE))
    said = {name: Counter(re.findall(r"`([A-Z]+ [a-z.]+)`", cell)) for name, cell in rows.items()}
    assert said["publish a version"] == PUBLISH
    assert said["follow a version"] == FOLLOW
    assert said["a poll that finds nothing"] == POLL
    assert said["every 16th poll"] == LOOK_AROUND
