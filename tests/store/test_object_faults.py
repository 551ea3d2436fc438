"""The object store through a proxy that breaks connections by script; every fault is counted."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.store.chaos_proxy import ChaosProxy, Fault, http_error
from tests.store.servers import s3_environment, use
from torch_delta.errors import ObjectExists, ObjectNotFound, StoreUnavailable
from torch_delta.store import Created
from torch_delta.store.object import ObjectStore
from torch_delta.store.object_config import ObjectConfig

pytestmark = pytest.mark.s3

COMMIT = "commits/00000000000000000001.json"
PART = "parts/00000000000000000001/00000-0000-0123456789abcdef.safetensors"
OTHER = PART.replace("0123456789abcdef", "fedcba9876543210")
COPY = b"x-amz-copy-source"
BIG = bytes(range(256)) * (20 << 12)  # 20 MiB: three chunks
QUICK = ObjectConfig(operation_timeout_s=1.0, request_timeout_s=0.5, stall_timeout_s=0.5, connect_timeout_s=0.5)


@pytest.fixture
def proxy(seaweed):
    with ChaosProxy(("127.0.0.1", seaweed.port)) as proxy:
        yield proxy


@pytest.fixture
def store(seaweed, proxy, monkeypatch):
    use(monkeypatch, s3_environment(proxy.port))
    with ObjectStore(seaweed.fresh_url(), config=ObjectConfig(operation_timeout_s=20.0)) as store:
        yield store


@pytest.fixture
def quick(store):
    with ObjectStore(store.url, config=QUICK) as quick:
        yield quick


def pieces():
    for begin in range(0, len(BIG), 1 << 20):
        yield BIG[begin : begin + (1 << 20)]


# Connections that break


def test_connections_reset_at_accept(store, seaweed, proxy) -> None:
    fault = proxy.add(Fault("reset", num_times=3))
    store.put_new(COMMIT, b"ours")
    assert fault.num_fired == 3
    assert seaweed.raw_get(store.url, COMMIT) == b"ours"


def test_uploads_cut_in_the_middle_of_a_chunk(store, seaweed, proxy) -> None:
    fault = proxy.add(Fault("cut up", b"partNumber=", num_times=2, after_bytes=1 << 20))
    assert store.put_new(PART, pieces()).size_bytes == len(BIG)
    assert fault.num_fired == 2
    assert seaweed.raw_get(store.url, PART) == BIG


def test_a_create_cut_on_the_way_up(store, seaweed, proxy) -> None:
    fault = proxy.add(Fault("cut up", b"PUT ", num_times=2, after_bytes=200_000))
    store.put_new(COMMIT, BIG[: 1 << 20])
    assert fault.num_fired == 2
    assert seaweed.raw_get(store.url, COMMIT) == BIG[: 1 << 20]


def test_downloads_cut_in_the_middle_of_a_body(store, seaweed, proxy) -> None:
    seaweed.raw_put(store.url, PART, BIG)
    fault = proxy.add(Fault("cut down", b"GET ", num_times=3, after_bytes=100_000))
    assert store.get(PART) == BIG
    assert fault.num_fired == 3


def test_a_listing_that_breaks_is_repeated_never_cut_short(store, seaweed, proxy) -> None:  # F78, F90
    keys = [f"commits/{number:020d}.json" for number in range(30)]
    for key in keys:
        seaweed.raw_put(store.url, key, b"x")
    fault = proxy.add(Fault("cut down", b"list-type=2", num_times=2, after_bytes=2000))
    assert [info.key for info in store.list("commits/")] == keys
    assert fault.num_fired == 2


# Replies that are lost


def test_a_create_whose_reply_is_swallowed_is_proved_by_reading_back(store, seaweed, proxy) -> None:
    fault = proxy.add(Fault("swallow", b"PUT "))
    store.put_new(COMMIT, b"ours")
    assert fault.num_fired == 1
    assert seaweed.raw_get(store.url, COMMIT) == b"ours"
    with pytest.raises(ObjectExists):  # equal bytes do not make it the second call's
        store.put_new(COMMIT, b"ours")


def test_two_lost_replies_in_a_row(store, seaweed, proxy) -> None:
    create, look = proxy.add(Fault("swallow", b"PUT ")), proxy.add(Fault("swallow", b"HEAD ", num_times=2))
    store.put_new(COMMIT, b"ours")
    assert (create.num_fired, look.num_fired) == (1, 2)
    assert seaweed.raw_get(store.url, COMMIT) == b"ours"


def test_a_lost_race_whose_reply_is_swallowed_is_still_lost(store, proxy) -> None:
    store.put_new(COMMIT, b"theirs")
    fault = proxy.add(Fault("swallow", b"PUT "))
    with pytest.raises(ObjectExists):
        store.put_new(COMMIT, b"ours")
    assert fault.num_fired == 1


def test_without_a_nonce_there_is_no_proof(store, seaweed, proxy) -> None:
    seaweed.raw_put(store.url, COMMIT, b"ours")  # as by a service that keeps no metadata
    fault = proxy.add(Fault("answer", b"PUT ", num_times=3, answer=http_error(500, "InternalError")))
    with pytest.raises(StoreUnavailable) as caught:
        store.put_new(COMMIT, b"ours")
    assert caught.value.facts["outcome"] == "unknown"
    assert store.create_or_same(COMMIT, b"ours") is Created.SAME  # the bytes decide
    with pytest.raises(ObjectExists):
        store.create_or_same(COMMIT, b"other")
    assert fault.num_fired == 3


def test_an_upload_whose_completion_is_swallowed_is_proved_by_reading_back(store, seaweed, proxy) -> None:
    fault = proxy.add(Fault("swallow", b"?uploadId="))  # only the request that completes starts its query so
    assert store.put_new(PART, pieces()).size_bytes == len(BIG)
    assert fault.num_fired == 1
    assert seaweed.raw_get(store.url, PART) == BIG


# Copies inside the bucket


SAID_YES_BUT = b"HTTP/1.1 200 OK\r\nContent-Length: 46\r\nConnection: close\r\n\r\n"  # S3 may fail a copy after its 200
SAID_YES_BUT += b"<Error><Code>InternalError</Code></Error>     "


@pytest.mark.parametrize(
    "fault",
    [
        Fault("swallow", COPY),
        Fault("answer", COPY, num_times=2, answer=http_error(503, "SlowDown")),
        Fault("answer", COPY, num_times=2, answer=http_error(500, "InternalError")),
        Fault("answer", COPY, num_times=2, answer=http_error(429, "TooManyRequests")),
        Fault("answer", COPY, answer=SAID_YES_BUT),
        Fault("reset", num_times=2),
    ],
    ids=["lost reply", "503", "500", "429", "200 with an error inside", "reset"],
)
def test_a_copy_survives_what_happens_on_the_way(store, seaweed, proxy, fault) -> None:
    store.put_new(PART, pieces())
    fault = proxy.add(replace(fault))
    copied = store.copy(PART, OTHER)
    assert fault.num_fired == fault.num_times
    assert (copied.key, copied.size_bytes) == (OTHER, len(BIG))
    assert seaweed.raw_get(store.url, OTHER) == BIG
    with pytest.raises(ObjectExists):
        store.copy(PART, OTHER)


def test_a_copy_and_the_look_at_it_whose_replies_are_lost(store, seaweed, proxy) -> None:
    store.put_new(PART, b"content")
    copy = proxy.add(Fault("swallow", COPY))
    look = proxy.add(Fault("swallow", b"HEAD ", num_times=4))  # two before it, at source and name, and two after it
    assert store.copy(PART, OTHER).size_bytes == 7
    assert (copy.num_fired, look.num_fired) == (1, 4)
    assert seaweed.raw_get(store.url, OTHER) == b"content"


def test_a_copy_that_is_refused_is_no_error_but_an_upload_for_the_caller(store, seaweed, proxy) -> None:
    store.put_new(PART, b"content")
    fault = proxy.add(Fault("answer", COPY, answer=http_error(403, "AccessDenied")))
    assert store.copy(PART, OTHER) is None
    assert (fault.num_fired, seaweed.raw_get(store.url, OTHER)) == (1, None)


def test_a_source_that_goes_before_it_is_copied_is_named(store, seaweed, proxy) -> None:  # F87
    store.put_new(PART, b"content")
    fault = proxy.add(Fault("answer", COPY, answer=http_error(404, "NoSuchKey")))
    with pytest.raises(ObjectNotFound, match="0123456789abcdef"):
        store.copy(PART, OTHER)
    assert (fault.num_fired, seaweed.raw_get(store.url, OTHER)) == (1, None)


def test_a_copy_that_nobody_answers_ends_in_time_and_says_what_is_known(store, quick, proxy) -> None:
    store.put_new(PART, b"content")
    fault = proxy.add(Fault("hang", COPY, num_times=10_000))
    with pytest.raises(StoreUnavailable, match="within 1 s") as caught:
        quick.copy(PART, OTHER)
    assert fault.num_fired > 1
    assert (caught.value.facts["phase"], caught.value.facts["outcome"]) == (f"copy {OTHER}", "unknown")
    assert caught.value.facts["peer"] == quick.url


# Answers that are errors


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests")])
def test_passing_errors_are_repeated(store, seaweed, proxy, status, code) -> None:
    faults = [
        proxy.add(Fault("answer", method, num_times=2, answer=http_error(status, code)))
        for method in (b"PUT ", b"HEAD ", b"GET ", b"POST ")
    ]
    store.put_new(COMMIT, b"ours")
    assert store.stat(COMMIT).size_bytes == 4
    assert store.get(COMMIT) == b"ours"
    store.put_new(PART, pieces())
    assert [info.key for info in store.list()] == [COMMIT, PART]
    assert [fault.num_fired for fault in faults] == [2, 2, 2, 2]
    assert seaweed.raw_get(store.url, PART) == BIG


def test_a_conflict_with_a_write_in_flight_is_no_answer(store, proxy) -> None:
    fault = proxy.add(Fault("answer", b"PUT ", answer=http_error(409, "ConditionalRequestConflict")))
    store.put_new(COMMIT, b"ours")
    assert fault.num_fired == 1


def test_a_refusal_is_final_and_says_what_to_check(store, proxy) -> None:
    faults = [
        proxy.add(Fault("answer", method, num_times=9, answer=http_error(403, "AccessDenied")))
        for method in (b"PUT ", b"HEAD ", b"GET ", b"POST ", b"DELETE ")
    ]
    calls = (
        lambda: store.put_new(COMMIT, b"ours"),
        lambda: store.put_hint("head.json", b"x"),
        lambda: store.stat(COMMIT),
        lambda: store.get(COMMIT),
        lambda: store.get_range(COMMIT, 0, 1),
        lambda: [*store.list()],  # F78: not an empty bucket
        lambda: store.put_new(PART, pieces()),
    )
    for number, call in enumerate(calls, start=1):
        with pytest.raises(StoreUnavailable, match="Access is refused: check the credentials") as caught:
            call()
        assert caught.value.facts["status"] == 403
        assert caught.value.facts["peer"] == store.url
        assert sum(fault.num_fired for fault in faults) == number  # one request each: nothing is repeated
    with pytest.raises(StoreUnavailable) as caught:
        store.put_new(COMMIT, b"ours")
    assert caught.value.facts["outcome"] == "absent"


def test_not_found_just_after_a_put_is_repeated_by_nobody_here(store, proxy) -> None:
    store.put_new(COMMIT, b"ours")
    fault = proxy.add(Fault("answer", b"HEAD ", answer=http_error(404, "NoSuchKey")))
    with pytest.raises(ObjectNotFound):  # a clear answer; polling is the caller's
        store.stat(COMMIT)
    assert store.stat(COMMIT).size_bytes == 4
    assert fault.num_fired == 1


def test_without_the_right_to_list_an_absent_object_is_still_absent(store, proxy) -> None:
    fault = proxy.add(Fault("answer", b"list-type=2", num_times=9, answer=http_error(403, "AccessDenied")))
    for _ in range(2):
        with pytest.raises(ObjectNotFound):
            store.stat(COMMIT)
    assert fault.num_fired == 1  # whether the bucket exists is asked once


def test_a_clock_that_is_off_is_named(store, proxy) -> None:
    fault = proxy.add(Fault("answer", b"PUT ", answer=http_error(403, "RequestTimeTooSkewed")))
    with pytest.raises(StoreUnavailable, match="The clock of this machine is off") as caught:
        store.put_new(COMMIT, b"ours")
    assert caught.value.facts["outcome"] == "absent"
    assert fault.num_fired == 1


# Slowness and silence


def test_a_slow_link_is_no_error(store, seaweed, proxy) -> None:
    seaweed.raw_put(store.url, PART, BIG[: 2 << 20])
    fault = proxy.add(Fault("throttle", b"GET "))
    assert store.get(PART) == BIG[: 2 << 20]
    assert fault.num_fired == 1


def test_a_download_that_trickles_is_cut_and_repeated_until_the_deadline(quick, seaweed, proxy) -> None:  # F80
    seaweed.raw_put(quick.url, PART, BIG)
    fault = proxy.add(Fault("trickle", b"GET ", num_times=10_000, after_bytes=100_000))
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="within 1 s") as caught:
        quick.get(PART)
    assert time.monotonic() - begin_s < 6.0
    assert (caught.value.facts["phase"], caught.value.facts["peer"]) == (f"get {PART}", quick.url)
    assert fault.num_fired > 1


def test_every_operation_ends_in_time_when_nobody_answers(quick, proxy) -> None:
    fault = proxy.add(Fault("hang", num_times=10_000))
    for operation, call in (
        ("get", lambda: quick.get(COMMIT)),
        ("get_range", lambda: quick.get_range(COMMIT, 0, 1)),
        ("stat", lambda: quick.stat(COMMIT)),
        ("list", lambda: [*quick.list()]),
        ("put_new", lambda: quick.put_new(COMMIT, b"x")),
        ("put_new", lambda: quick.put_new(PART, pieces())),
        ("put_hint", lambda: quick.put_hint("head.json", b"x")),
        ("delete", lambda: quick.delete(COMMIT)),
    ):
        num_before, begin_s = fault.num_fired, time.monotonic()
        with pytest.raises(StoreUnavailable, match="within 1 s") as caught:
            call()
        assert time.monotonic() - begin_s < 6.0, operation  # 1 s + requests of 0.5 s, on a busy machine
        assert fault.num_fired > num_before + 1  # more than one attempt
        assert caught.value.facts["phase"].startswith(operation)
        assert caught.value.facts["peer"] == quick.url


def test_an_upload_that_falls_silent_ends_in_time_holds_few_chunks_and_leaves_nothing(quick, seaweed, proxy) -> None:
    fault = proxy.add(Fault("hang", b"partNumber=", num_times=10_000))
    handed_over = []

    def many_pieces():
        for number in range(200):
            handed_over.append(number)
            yield bytes(1 << 20)

    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        quick.put_new(PART, many_pieces())
    assert time.monotonic() - begin_s < 10.0
    assert caught.value.facts["outcome"] == "absent"
    assert fault.num_fired > 1
    assert len(handed_over) <= (QUICK.num_parallel + 3) * 8
    assert seaweed.raw_get(quick.url, PART) is None


def test_closing_ends_a_wait_at_once(seaweed, proxy, monkeypatch) -> None:
    use(monkeypatch, s3_environment(proxy.port))
    store = ObjectStore(seaweed.fresh_url(), config=ObjectConfig(operation_timeout_s=3600.0))
    fault = proxy.add(Fault("answer", b"HEAD ", num_times=10_000, answer=http_error(503, "SlowDown")))
    wait = store._stop.wait

    def close_then_wait(timeout):
        store.close()
        return wait(timeout)

    monkeypatch.setattr(store._stop, "wait", close_then_wait)
    with pytest.raises(StoreUnavailable, match="503"):
        store.stat(COMMIT)
    assert fault.num_fired == 1
