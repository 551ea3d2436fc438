"""The Hub store when the Hub, the content store or the network fails by script; every fault is counted."""

from __future__ import annotations

import threading
import time

import pytest

from tests.store.chaos_proxy import ChaosProxy, Fault
from tests.store.fake_hub import HubFault
from tests.store.hubs import raw_get, raw_put, split, use_hub
from torch_delta.errors import FormatError, ObjectNotFound, StoreUnavailable
from torch_delta.store import open_store
from torch_delta.store.hub import HubStore
from torch_delta.store.hub_config import HubConfig

COMMIT = "commits/00000000000000000001.json"
PART = "parts/00000000000000000001/00000-0000-0123456789abcdef.safetensors"
BIG = bytes(range(256)) * (10 << 12)  # 10 MiB: above a chunk
QUICK = HubConfig(operation_timeout_s=1.0, request_timeout_s=0.4, stall_timeout_s=0.4, connect_timeout_s=0.4)


@pytest.fixture
def store(hub, hub_url):
    with HubStore(hub_url, config=HubConfig(operation_timeout_s=60.0, stall_timeout_s=15.0)) as store:
        yield store


@pytest.fixture
def quick(store):
    with HubStore(store.url, config=QUICK) as quick:
        yield quick


def pieces():
    for begin in range(0, len(BIG), 1 << 20):
        yield BIG[begin : begin + (1 << 20)]


def batches(hub) -> int:
    return sum("/batch" in line for line in hub.requests)


# Listings


def test_pages_are_followed_to_the_end(store, hub) -> None:  # F90
    hub.page_size = 2
    keys = [f"commits/{number:020d}.json" for number in range(7)]
    for key in keys:
        raw_put(hub, store.url, key, b"x")
    assert [info.key for info in store.list("commits/")] == keys
    assert sum("/tree" in line for line in hub.requests) == 4


def test_a_listing_that_fails_on_its_second_page_is_never_half_an_answer(quick, hub) -> None:  # F78
    hub.page_size = 2
    for number in range(5):
        raw_put(hub, quick.url, f"commits/{number:020d}.json", b"x")
    fault = hub.add(HubFault("cursor=", num_times=1000))
    with pytest.raises(StoreUnavailable) as caught:
        next(iter(quick.list("commits/")))
    assert caught.value.facts["phase"].startswith("list")
    assert fault.num_fired > 1


# Answers that are errors


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_errors_are_repeated(store, hub, status) -> None:
    faults = [hub.add(HubFault(f"{name}", status=status)) for name in ("/batch", "paths-info", "/tree", "/resolve")]
    store.put_new(COMMIT, b"ours")
    assert store.get(COMMIT) == b"ours"
    assert [info.key for info in store.list()] == [COMMIT]
    store.delete(COMMIT)
    assert [fault.num_fired for fault in faults] == [1, 1, 1, 1]


def test_the_hub_is_not_asked_again_before_it_said(store, hub) -> None:
    fault = hub.add(HubFault("paths-info", status=429, headers={"Retry-After": "1"}))
    raw_put(hub, store.url, COMMIT, b"x")
    begin_s = time.monotonic()
    store.stat(COMMIT)
    assert time.monotonic() - begin_s >= 1.0
    assert fault.num_fired == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_final_and_says_what_to_check(store, hub, status) -> None:
    fault = hub.add(HubFault("/(api|buckets)/", status=status, num_times=1000))
    for number, call in enumerate(
        (
            lambda: store.stat(COMMIT),
            lambda: store.get(COMMIT),
            lambda: store.get_range(COMMIT, 0, 1),
            lambda: [*store.list()],  # F78: not an empty bucket
            lambda: store.delete(COMMIT),
            lambda: store.put_new(COMMIT, b"ours"),
        ),
        start=1,
    ):
        with pytest.raises(StoreUnavailable, match="HF_TOKEN") as caught:
            call()
        assert caught.value.facts["status"] == status
        assert caught.value.facts["outcome"] in {"absent", "unknown"}
        assert fault.num_fired == number  # one request each: nothing is repeated


def test_a_missing_bucket_is_never_an_empty_store(hub) -> None:  # F78
    with open_store("hf://buckets/tester/nowhere/run") as store:
        for call in (
            lambda: store.stat(COMMIT),
            lambda: store.get(COMMIT),
            lambda: store.get_range(COMMIT, 0, 1),
            lambda: [*store.list()],
            lambda: [*store.list("commits/")],
            lambda: store.delete(COMMIT),
            lambda: store.put_new(COMMIT, b"x"),
        ):
            with pytest.raises(StoreUnavailable, match=r"no such bucket.*hf buckets create"):
                call()


def test_without_a_file_in_it_a_folder_is_empty_but_only_in_a_bucket_that_exists(store, hub) -> None:
    fault = hub.add(HubFault("/tree", status=404, headers={"X-Error-Code": "EntryNotFound"}, num_times=2))
    assert [*store.list("commits/")] == []
    bucket, _ = split(store.url)
    del hub.buckets[bucket]
    with open_store(store.url) as again, pytest.raises(StoreUnavailable, match="no such bucket"):
        [*again.list("commits/")]
    assert fault.num_fired == 2
    hub.buckets[bucket] = {}


# Silence, and transfers that stop in the middle


def test_every_operation_ends_in_time_when_nobody_answers(hub, hub_url) -> None:
    limits = {"request_timeout_s": 0.2, "stall_timeout_s": 0.2, "connect_timeout_s": 0.2}
    quick = HubStore(hub_url, config=HubConfig(operation_timeout_s=0.4, **limits))
    fault = hub.add(HubFault("", hangs=True, num_times=10_000))
    for operation, call in (
        ("get", lambda: quick.get(COMMIT)),
        ("get_range", lambda: quick.get_range(COMMIT, 0, 1)),
        ("stat", lambda: quick.stat(COMMIT)),
        ("list", lambda: [*quick.list()]),
        ("put_new", lambda: quick.put_new(COMMIT, b"x")),
        ("put_hint", lambda: quick.put_hint("head.json", b"x")),
        ("delete", lambda: quick.delete(COMMIT)),
        ("sweep_temporary", lambda: quick.sweep_temporary(older_than_s=0.0)),
    ):
        num_before, begin_s = fault.num_fired, time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"within 0\.4 s") as caught:
            call()
        assert time.monotonic() - begin_s < 8.0, operation
        assert fault.num_fired > num_before + 1  # more than one attempt
        assert caught.value.facts["phase"].startswith(operation)
        assert caught.value.facts["peer"] == quick.url


def test_an_upload_that_falls_silent_ends_in_time_and_names_nothing(quick, hub) -> None:  # F80
    fault = hub.add(HubFault("POST /v1/xorbs", hangs=True, num_times=10_000))
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no byte moved for 0.4 s") as caught:
        quick.put_new(PART, pieces())
    assert time.monotonic() - begin_s < 8.0
    assert caught.value.facts["outcome"] == "absent"
    assert fault.num_fired >= 1
    assert (batches(hub), raw_get(hub, quick.url, PART)) == (0, None)


def test_a_download_that_stalls_goes_on_by_plain_requests(hub, hub_url) -> None:  # F80
    raw_put(hub, hub_url, PART, BIG)
    fault = hub.add(HubFault("GET /xorb-data", hangs=True, num_times=10_000))
    with HubStore(hub_url, config=HubConfig(stall_timeout_s=1.0)) as store:
        assert store.get(PART) == BIG
        assert store.get_range(PART, 1, len(BIG) - 2) == BIG[1:-1]
    assert fault.num_fired >= 2


@pytest.mark.slow  # hf-xet takes its time between attempts
def test_hf_xet_survives_errors_of_the_content_store(hub, hub_url) -> None:
    faults = [hub.add(HubFault(line)) for line in ("POST /v1/xorbs", "GET /v1/reconstructions", "GET /xorb-data")]
    with HubStore(hub_url) as store:
        store.put_new(PART, pieces())
        assert store.get_range(PART, 0, len(BIG)) == BIG
    assert [fault.num_fired for fault in faults] == [1, 1, 1]
    assert not any("/resolve/" in line for line in hub.requests)


def test_a_source_that_takes_its_time_is_no_stall(hub, hub_url) -> None:
    waited = threading.Event()

    def slow_pieces():
        yield b"a"
        waited.wait(2.5)  # longer than the stall timeout
        yield b"b"

    with HubStore(hub_url, config=HubConfig(stall_timeout_s=2.0)) as store:
        store.put_new(PART, slow_pieces())
    assert raw_get(hub, hub_url, PART) == b"ab"


def test_a_long_object_is_refused_before_it_is_read(store, hub) -> None:
    raw_put(hub, store.url, PART, BIG)
    with pytest.raises(FormatError):
        store.get(PART, max_bytes=len(BIG) - 1)
    assert not any("reconstructions" in line for line in hub.requests)


def test_closing_ends_a_wait_at_once(hub, hub_url, monkeypatch) -> None:
    store = HubStore(hub_url, config=HubConfig(operation_timeout_s=3600.0))
    fault = hub.add(HubFault("paths-info", num_times=10_000))
    wait = store._stop.wait

    def close_then_wait(timeout):
        store.close()
        return wait(timeout)

    monkeypatch.setattr(store._stop, "wait", close_then_wait)
    with pytest.raises(StoreUnavailable, match="503"):
        store.stat(COMMIT)
    assert fault.num_fired == 1
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get(COMMIT)


# Connections that break


def test_connections_that_are_reset_or_cut(hub, hub_url, monkeypatch, tmp_path) -> None:
    raw_put(hub, hub_url, PART, BIG)
    with ChaosProxy(("127.0.0.1", hub.port)) as proxy:
        use_hub(monkeypatch, tmp_path, proxy.port)
        reset = proxy.add(Fault("reset", num_times=3))
        cut = proxy.add(Fault("cut down", b"/resolve/", num_times=2, after_bytes=100_000))
        swallow = proxy.add(Fault("swallow", b"/batch", num_times=2))
        with HubStore(hub_url, config=HubConfig(operation_timeout_s=20.0, stall_timeout_s=2.0)) as store:
            assert store.get(PART) == BIG
            store.put_new(COMMIT, b"ours")
            with pytest.raises(ObjectNotFound):
                store.stat("head.json")
        assert (reset.num_fired, cut.num_fired, swallow.num_fired) == (3, 2, 2)
    assert raw_get(hub, hub_url, COMMIT) == b"ours"


def test_a_reply_that_trickles_is_cut_and_repeated_until_the_deadline(hub, hub_url, monkeypatch, tmp_path) -> None:
    raw_put(hub, hub_url, PART, BIG)
    with ChaosProxy(("127.0.0.1", hub.port)) as proxy:
        use_hub(monkeypatch, tmp_path, proxy.port)
        fault = proxy.add(Fault("trickle", b"/resolve/", num_times=10_000, after_bytes=100_000))
        begin_s = time.monotonic()
        with HubStore(hub_url, config=QUICK) as quick, pytest.raises(StoreUnavailable, match="too slow") as caught:
            quick.get(PART)
        assert time.monotonic() - begin_s < 6.0
        assert (caught.value.facts["phase"], caught.value.facts["peer"]) == (f"get {PART}", hub_url)
        assert fault.num_fired > 1
