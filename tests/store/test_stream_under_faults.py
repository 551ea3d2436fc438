"""A stream in a bucket whose every request goes wrong once: published, followed and cleaned, bit for bit."""

from __future__ import annotations

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, edit, edited, initial, same, write_checkpoint
from tests.publish.support import config
from tests.publish.test_anchors import TABLE
from tests.store.chaos_proxy import ChaosProxy, Fault, http_error
from tests.store.servers import s3_environment, use
from torch_delta.config import RetentionConfig
from torch_delta.errors import DeadlineExceeded, PublishFailed, StoreUnavailable
from torch_delta.publish import attach_source
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store.object import ObjectStore
from torch_delta.store.object_config import ObjectConfig
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage

pytestmark = pytest.mark.s3

PATIENT = {"commit_timeout_s": 60.0, "wait_timeout_s": 120.0, "receipt_timeout_s": 60.0, "anchor_first": False}
QUICK = ObjectConfig(operation_timeout_s=2.0, request_timeout_s=2.0, stall_timeout_s=2.0, connect_timeout_s=2.0)


def script(kind: str) -> list[Fault]:
    """The same trouble for every request of a version, an anchor and a poll."""
    matches = [
        *(b"PUT /td-tests/", b"HEAD /td-tests/", b"GET /td-tests/"),
        *(b"/parts/", b"/commits/", b"/head.json", b"/anchors/", b"/claims/"),
    ]
    match kind:
        case "503":
            return [Fault("answer", match, answer=http_error(503, "SlowDown")) for match in matches]
        case "429":
            return [Fault("answer", match, answer=http_error(429, "TooManyRequests")) for match in matches]
        case "reply lost":
            return [Fault("swallow", match) for match in matches]
        case "cut down":
            return [Fault("cut down", match, after_bytes=40) for match in matches]
        case _:
            return [Fault("reset", num_times=5), *(Fault("cut up", match, after_bytes=10) for match in matches)]


@pytest.mark.parametrize("kind", ["503", "429", "reply lost", "cut down", "reset and cut up"])
def test_every_kind_of_request_fails_once(seaweed, monkeypatch, tmp_path, kind: str) -> None:
    base = write_checkpoint(tmp_path / "base", initial())
    url = seaweed.fresh_url()
    with ChaosProxy(("127.0.0.1", seaweed.port)) as proxy:
        use(monkeypatch, s3_environment(proxy.port))
        faults = [proxy.add(fault) for fault in script(kind)]
        checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
        with (
            ObjectStore(url) as store,
            attach_source(ArraySource(), store, base=base, config=config(**PATIENT)) as publisher,
            Follower(url, poll_interval_s=0.01, most_poll_interval_s=0.05) as follower,
        ):
            for seed in (1, 2, 3):
                edit(publisher._source, seed)
                publisher.publish()
                publisher.wait()
                reports = list(follower.apply_to(checkpoint, until=seed, timeout_s=120))
                assert [report.version for report in reports][-1] == seed
                publisher.anchor()
            report = collect_garbage(Stream(store), RetentionConfig(grace_s=0))
            assert (report.floor, report.failures) == (2, ())
        assert [fault.num_fired for fault in faults] == [fault.num_times for fault in faults]
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, TABLE), edited([1, 2, 3]))
    checkpoint.verify()


@pytest.mark.parametrize("kind", ["hang", "403"])
def test_a_bucket_that_goes_away_ends_every_wait_in_time_and_loses_nothing(
    seaweed, monkeypatch, tmp_path, kind: str
) -> None:
    # F32, W3: a black hole, and credentials that ran out
    base = write_checkpoint(tmp_path / "base", initial())
    url = seaweed.fresh_url()
    with ChaosProxy(("127.0.0.1", seaweed.port)) as proxy:
        use(monkeypatch, s3_environment(proxy.port))
        checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
        settings = config(**{**PATIENT, "commit_timeout_s": 1.0})
        with (
            ObjectStore(url, config=QUICK) as store,
            attach_source(ArraySource(), store, base=base, config=settings) as publisher,
            Follower(store, poll_interval_s=0.01, most_poll_interval_s=0.05, retry_s=1.0) as follower,
        ):
            edit(publisher._source, 1)
            publisher.publish()
            publisher.wait()
            assert [r.version for r in follower.apply_to(checkpoint, until=1, timeout_s=60)][-1] == 1
            answer = http_error(403, "AccessDenied")
            gone = [proxy.add(Fault("hang" if kind == "hang" else "answer", num_times=100_000, answer=answer))]
            edit(publisher._source, 2)
            publisher.publish()
            with pytest.raises(PublishFailed) as failed:
                publisher.wait()
            assert failed.value.failures.keys() == {0}
            with pytest.raises((StoreUnavailable, DeadlineExceeded)) as lost:
                list(follower.apply_to(checkpoint, until=2, timeout_s=3))
            assert url in str(lost.value)
            assert gone[0].num_fired > 1
            gone[0].num_times = 0  # it is back
            edit(publisher._source, 3)
            publisher.publish()
            publisher.wait()
            assert publisher.version == 2
            assert [r.version for r in follower.apply_to(checkpoint, until=2, timeout_s=60)][-1] == 2
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, TABLE), edited([1, 2, 3]))
