"""Writing to the Hub store: failed entries, lost replies, other writers and dead ones; every fault is counted."""

from __future__ import annotations

import time

import pytest

from tests.store.fake_hub import EntryFault, HubFault
from tests.store.hubs import raw_get, raw_put, split
from torch_delta.errors import ObjectExists, StoreUnavailable
from torch_delta.store import Created
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


# A batch that was answered, and what it did


def test_an_entry_that_failed_in_an_answer_of_200_is_noticed_and_repeated(store, hub) -> None:  # F76
    fault = EntryFault("parts/", num_times=2)
    hub.entry_faults.append(fault)
    assert store.put_new(PART, pieces()).size_bytes == len(BIG)
    assert fault.num_fired == 2
    assert raw_get(hub, store.url, PART) == BIG


def test_an_entry_that_always_fails_is_an_error_with_the_hubs_words(quick, hub) -> None:  # F76
    fault = EntryFault("parts/", num_times=1000)
    hub.entry_faults.append(fault)
    with pytest.raises(StoreUnavailable, match="the Hub did not add it: internal error") as caught:
        quick.put_new(PART, pieces())
    assert caught.value.facts["peer"] == quick.url
    assert fault.num_fired > 1
    assert raw_get(hub, quick.url, PART) is None


def test_a_hint_and_a_deletion_whose_entries_failed_are_repeated(store, hub) -> None:
    raw_put(hub, store.url, PART, b"x")
    hub.entry_faults += (faults := [EntryFault("head.json"), EntryFault("parts/")])
    store.put_hint("head.json", b"x")
    store.delete(PART)
    assert [fault.num_fired for fault in faults] == [1, 1]
    assert raw_get(hub, store.url, PART) is None
    assert raw_get(hub, store.url, "head.json") == b"x"


def test_an_object_that_becomes_visible_late_is_waited_for(store, hub) -> None:
    bucket, prefix = split(store.url)
    hub.before_add = lambda path: hub.hidden.update({path: 2}) if path == f"{prefix}/{PART}" else None
    store.put_new(PART, pieces())
    assert hub.hidden[f"{prefix}/{PART}"] < 0  # it was looked for in vain twice, and then found
    assert PART in {path.removeprefix(f"{prefix}/") for path in hub.buckets[bucket]}


# Replies that are lost


def test_a_create_whose_reply_is_lost_is_found_by_reading_back(store, hub) -> None:
    adds = []
    hub.before_add = adds.append
    fault = hub.add(HubFault("POST .*/batch", is_after=True, num_times=2))  # of the claim, and of the object
    store.put_new(COMMIT, b"ours")
    assert fault.num_fired == 2
    assert [path.endswith(COMMIT) for path in adds].count(True) == 1  # nothing was added twice
    assert raw_get(hub, store.url, COMMIT) == b"ours"
    with pytest.raises(ObjectExists):
        store.put_new(COMMIT, b"ours")


def test_a_streamed_put_whose_reply_is_lost(store, hub) -> None:
    fault = hub.add(HubFault("POST .*/batch", is_after=True))
    store.put_new(PART, pieces())
    assert (fault.num_fired, batches(hub)) == (1, 1)
    assert raw_get(hub, store.url, PART) == BIG


def test_batches_that_never_arrived_are_repeated(store, hub) -> None:
    fault = hub.add(HubFault("POST .*/batch", status=0, num_times=3))
    store.put_new(COMMIT, b"ours")
    assert fault.num_fired == 3
    assert raw_get(hub, store.url, COMMIT) == b"ours"


def test_an_unknown_outcome_stays_unknown_and_can_be_repeated(store, quick, hub) -> None:
    batch = hub.add(HubFault("POST .*/batch", is_after=True, num_times=1000))
    look = hub.add(HubFault("POST .*/paths-info", num_times=1000))
    look.num_fired = 1000  # not yet
    hub.before_add = lambda path: setattr(look, "num_fired", 0) if path.endswith("safetensors") else None
    with pytest.raises(StoreUnavailable) as caught:
        quick.put_new(PART, pieces())
    assert caught.value.facts["outcome"] == "unknown"
    assert batch.num_fired > 0
    assert look.num_fired > 0
    hub.reset()
    assert store.create_or_same(PART, BIG) is Created.SAME


# Other writers


def test_a_claim_of_a_dead_writer_is_passed_after_a_while(hub, hub_url) -> None:
    config = HubConfig(operation_timeout_s=60.0, claim_timeout_s=3.0)
    for nonce in ("0" * 32, "f" * 32):  # below and above ours: we would wait, or step back
        raw_put(hub, hub_url, f".claims/{COMMIT}/{nonce}", b"x")
    with HubStore(hub_url, config=config) as store:
        begin_s = time.monotonic()
        store.put_new(COMMIT, b"ours")
        assert time.monotonic() - begin_s > 3.0
    assert raw_get(hub, hub_url, COMMIT) == b"ours"
    assert [path for path in hub.buckets[split(hub_url)[0]] if ".claims" in path] == []


def test_a_living_writers_claim_is_respected_until_the_deadline(quick, hub) -> None:
    raw_put(hub, quick.url, f".claims/{COMMIT}/{'0' * 32}", b"x")
    with pytest.raises(StoreUnavailable, match="another writer's claim") as caught:
        quick.put_new(COMMIT, b"ours")
    assert caught.value.facts["outcome"] == "absent"
    assert raw_get(hub, quick.url, COMMIT) is None


def test_a_writer_whose_claim_ran_out_adds_nothing_any_more(hub, hub_url) -> None:
    config = HubConfig(operation_timeout_s=60.0, claim_timeout_s=4.0)
    added = []

    def fail_from_now_on(path: str) -> None:
        added.append(path)
        hub.faults.append(HubFault("POST .*/batch", num_times=10_000))

    hub.before_add = fail_from_now_on  # the claim is added, nothing after it
    begin_s = time.monotonic()
    with (
        HubStore(hub_url, config=config) as store,
        pytest.raises(StoreUnavailable, match="claim of the name ran out") as caught,
    ):
        store.put_new(COMMIT, b"ours")
    assert 2.0 <= time.monotonic() - begin_s < 20.0
    assert caught.value.facts["outcome"] == "unknown"
    assert len(added) == 1
    claims = [path for path in hub.buckets[split(hub_url)[0]] if ".claims" in path]
    assert claims == added  # it stays: a request may still be on its way, and nobody else must come before it
    assert hub.faults[0].num_fired > 2
    assert raw_get(hub, hub_url, COMMIT) is None


def test_an_object_that_appears_while_we_claim_is_another_writers(store, hub) -> None:
    bucket, prefix = split(store.url)

    def overtake(path: str) -> None:
        if ".claims" in path:
            raw_put(hub, store.url, COMMIT, b"theirs")

    hub.before_add = overtake
    with pytest.raises(ObjectExists):
        store.put_new(COMMIT, b"ours")
    assert raw_get(hub, store.url, COMMIT) == b"theirs"
    assert [path for path in hub.buckets[bucket] if path.startswith(f"{prefix}/.claims")] == []


def test_being_overwritten_by_a_writer_without_manners_is_noticed_at_once(store, hub) -> None:
    hub.after_batch = lambda: raw_put(hub, store.url, PART, b"theirs")
    with pytest.raises(ObjectExists):
        store.put_new(PART, pieces())


def test_sweeping_removes_old_claims_only(store, hub) -> None:
    bucket, prefix = split(store.url)
    for nonce, when in (("0" * 32, "2020-01-01T00:00:00.000Z"), ("1" * 32, None)):
        raw_put(hub, store.url, f".claims/{COMMIT}/{nonce}", b"x")
        if when is not None:
            hub.buckets[bucket][f"{prefix}/.claims/{COMMIT}/{nonce}"]["uploadedAt"] = when
    assert store.sweep_temporary(older_than_s=3600.0) == 1
    assert [path[-32:] for path in hub.buckets[bucket] if ".claims" in path] == ["1" * 32]
