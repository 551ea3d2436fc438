"""The fault injector itself: every effect does what it says, exactly as often as the script says."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_delta.errors import ObjectExists, ObjectNotFound, StoreUnavailable
from torch_delta.store import Created, MemoryStore
from torch_delta.testing import Crash, Fault, FaultyStore, StoreSuite
from torch_delta.testing.faults import call, crash_after, crash_before, cut, fail_after, fail_before, flip_bit, truncate

KEY = "commits/1.json"


class TestFaultyStoreWithoutFaults(StoreSuite):
    @pytest.fixture
    def store(self):
        return FaultyStore(MemoryStore())

    def raw_put(self, store, key, data):
        store.inner._shelf.objects[key] = (data, 0.0)

    def raw_get(self, store, key):
        found = store.inner._shelf.objects.get(key)
        return None if found is None else found[0]


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


def test_failing_before_leaves_nothing_and_says_so(inner) -> None:
    store = FaultyStore(inner, [Fault("put_new", KEY, effect=fail_before())])
    with pytest.raises(StoreUnavailable) as caught:
        store.put_new(KEY, b"x")
    assert caught.value.facts["outcome"] == "absent"
    with pytest.raises(ObjectNotFound):
        inner.get(KEY)
    store.put_new(KEY, b"x")
    store.assert_fired()
    assert store.calls["put_new"] == 2


def test_a_lost_reply_leaves_the_object(inner) -> None:
    store = FaultyStore(inner, [Fault("put_new", KEY, effect=fail_after())])
    with pytest.raises(StoreUnavailable) as caught:
        store.put_new(KEY, b"x")
    assert caught.value.facts["outcome"] == "unknown"
    assert inner.get(KEY) == b"x"


@pytest.mark.parametrize(("effect", "is_there"), [(crash_before(), False), (crash_after(), True)])
def test_a_crash_passes_every_handler_of_exceptions(inner, effect, is_there) -> None:
    store = FaultyStore(inner, [Fault("put_new", effect=effect)])
    with pytest.raises(Crash), contextlib.suppress(Exception):
        store.put_new(KEY, b"x")
    assert [info.key for info in inner.list()] == ([KEY] if is_there else [])


def test_nth_and_times_count_matching_calls_only(inner) -> None:
    fault = Fault("stat", "commits/*", effect=fail_before(TimeoutError()), nth=2, times=2)
    store = FaultyStore(inner, [fault])
    inner.put_new(KEY, b"x")
    inner.put_new("parts/1", b"x")
    outcomes = []
    for key in (KEY, "parts/1", KEY, "parts/1", KEY, KEY):
        try:
            store.stat(key)
            outcomes.append("ok")
        except TimeoutError:
            outcomes.append("failed")
    assert outcomes == ["ok", "ok", "failed", "ok", "failed", "ok"]
    assert store.fired() == (2,)
    store.assert_fired()


def test_a_fault_that_never_fired_fails_the_test(inner) -> None:
    store = FaultyStore(inner, [Fault("delete", "x", nth=2)])
    store.delete("x")
    with pytest.raises(AssertionError, match="fired 0 times"):
        store.assert_fired()
    store.add(Fault("get", times=None, effect=fail_before()))
    with pytest.raises(StoreUnavailable):
        store.get(KEY)
    assert store.fired() == (0, 1)


def test_reads_can_be_damaged_and_the_object_stays_whole(inner) -> None:
    inner.put_new(KEY, b"0123456789")
    store = FaultyStore(
        inner,
        [
            Fault("get", effect=flip_bit(byte=-1, bit=1)),
            Fault("get", nth=2, effect=truncate(4)),
            Fault("get_range", effect=truncate(1)),
        ],
    )
    assert store.open_local(KEY) is None  # or a reader would go round the damage
    assert store.get(KEY) == b"012345678;"
    assert store.get(KEY) == b"0123"
    assert store.get(KEY) == b"0123456789"
    assert store.get_range(KEY, 2, 4) == b"2"
    store.assert_fired()


@pytest.mark.parametrize("data", [b"0123456789", [b"0123", b"456789"]])
def test_a_cut_put_stores_nothing(inner, data) -> None:
    store = FaultyStore(inner, [Fault("put_new", effect=cut(6))])
    with pytest.raises(ConnectionError, match="after 6 bytes"):
        store.put_new(KEY, data)
    assert [*inner.list()] == []


def test_a_delay_is_an_event_not_a_sleep(inner) -> None:
    entered, gate = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert gate.wait(60)

    store = FaultyStore(inner, [Fault("put_new", effect=call(wait))])
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put_new, KEY, b"x")
        assert entered.wait(60)
        assert not put.done()
        assert [*inner.list()] == []
        gate.set()
        put.result(60)
    assert inner.get(KEY) == b"x"


# What `Store.create_or_same` makes of them


def test_an_unknown_outcome_that_was_another_writers(inner) -> None:
    store = FaultyStore(
        inner,
        [
            Fault("put_new", effect=call(lambda: inner.put_new(KEY, b"theirs"))),
            Fault("put_new", effect=fail_before(StoreUnavailable("lost", outcome="unknown"))),
        ],
    )
    with pytest.raises(ObjectExists, match="another writer"):
        store.create_or_same(KEY, b"ours")
    store.assert_fired()


def test_an_unknown_outcome_that_stays_unknown_is_raised_and_can_be_repeated(inner) -> None:
    store = FaultyStore(inner, [Fault("put_new", effect=fail_after()), Fault("stat", effect=fail_before())])
    with pytest.raises(StoreUnavailable) as caught:
        store.create_or_same(KEY, b"ours")
    assert caught.value.facts["outcome"] == "unknown"
    assert store.create_or_same(KEY, b"ours") is Created.SAME
    store.assert_fired()


def test_absent_after_an_unknown_outcome_is_no_proof(inner) -> None:
    lost = fail_before(StoreUnavailable("lost", outcome="unknown"))  # the request may still be on its way
    store = FaultyStore(inner, [Fault("put_new", effect=lost)])
    with pytest.raises(StoreUnavailable) as caught:
        store.create_or_same(KEY, b"ours")
    assert caught.value.facts["outcome"] == "unknown"
    inner.put_new(KEY, b"ours")  # and now it lands
    assert store.create_or_same(KEY, b"ours") is Created.SAME


def test_a_clear_failure_is_not_read_back(inner) -> None:
    store = FaultyStore(inner, [Fault("put_new", effect=fail_before())])
    with pytest.raises(StoreUnavailable):
        store.create_or_same(KEY, b"ours")
    assert (store.calls["stat"], store.calls["get_range"]) == (0, 0)


def test_large_objects_are_compared_in_blocks(inner) -> None:
    pieces = (bytes(5 << 20), bytes(20 << 20), b"end")
    inner.put_new(KEY, pieces)
    store = FaultyStore(inner)
    assert store.create_or_same(KEY, pieces) is Created.SAME
    assert store.calls["get_range"] == 1 + 3 + 1
    with pytest.raises(ObjectExists):
        store.create_or_same(KEY, (bytes(25 << 20), b"End"))
