"""Finding the newest version: by the hint, without it, with a lying one, and at the cost of one request per poll."""

from __future__ import annotations

import pytest

from tests.stream.samples import (
    OTHER_ID,
    STREAM_ID,
    commit_key,
    make_anchor,
    raw,
    raw_delete,
    raw_put,
    seal,
    write_chain,
)
from torch_delta.errors import StoreUnavailable
from torch_delta.store import LocalStore, poll
from torch_delta.stream import Stream
from torch_delta.testing import Fault, FaultyStore
from torch_delta.testing.faults import fail_before


def hint(version: int, stream_id: str = STREAM_ID, **changes) -> bytes:
    fields = {"format_version": [1, 0], "stream_id": stream_id, "version": version, "commit_sha256": "0" * 64}
    return seal({**fields, **changes})


@pytest.fixture
def counting(store, writer) -> FaultyStore:
    """The store of a stream at version 12, with its hint, and nothing asked yet but the stream's identity."""
    write_chain(writer, 1, 12)
    return FaultyStore(store)


@pytest.fixture
def reader(counting) -> Stream:
    stream = Stream(counting)
    stream.load()
    counting.calls.clear()
    return stream


def test_the_hint_leads_to_the_head_without_a_listing(reader, counting) -> None:  # rule R2
    assert reader.head() == 12
    assert counting.calls == {"get": 1, "stat": 2}


def test_a_poll_costs_one_small_request(reader, counting) -> None:  # F107
    assert reader.head(12) == 12
    assert counting.calls == {"stat": 1}


def test_a_stale_hint_is_probed_on_from(reader, counting, store) -> None:  # rules R2, H1
    raw_put(store, "head.json", hint(9))
    assert reader.head() == 12
    assert counting.calls == {"get": 1, "stat": 5}
    assert reader.head(10) == 12  # also when the caller knows better than the hint


def test_a_reader_that_was_away_does_not_probe_every_version(reader, counting) -> None:
    assert reader.head(1) == 12
    assert counting.calls == {"get": 1, "stat": 3}


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        b"",
        b"garbage",
        hint(12)[:-1],
        hint(12).replace(b'"version": 12', b'"version": 11'),
        hint(12, OTHER_ID),
        hint(99),  # of a commit that does not exist
        seal({"format_version": [1, 0], "stream_id": STREAM_ID, "version": "12", "commit_sha256": "0" * 64}),
        hint(12, format_version=[2, 0]),
        bytes(1 << 20),
    ],
)
def test_a_bad_hint_costs_a_listing_and_nothing_else(reader, counting, store, damaged) -> None:  # rules R2, H1
    if damaged is None:
        raw_delete(store, "head.json")
    else:
        raw_put(store, "head.json", damaged)
    assert reader.head() == 12
    assert counting.calls["list"] == 1
    assert reader.head(5) == 12


def test_versions_before_the_retained_ones_are_not_needed(reader, store) -> None:
    raw_delete(store, *(commit_key(version) for version in range(1, 9)), "head.json")
    assert reader.head() == 12
    assert reader.available() == (9, 12)


@pytest.mark.parametrize(("target", "found"), [(12, (6, 12)), (7, (6, 7)), (5, (1, 4)), (4, (1, 4))])
def test_a_lost_commit_cuts_off_those_before_it(reader, store, target, found) -> None:  # rule R3
    raw_delete(store, commit_key(5))
    assert reader.available() == (1, 12)
    assert reader.available(leading_to=target) == found


def test_without_any_commit_the_newest_anchor_is_the_head(store, writer) -> None:
    sha256s = write_chain(writer, 1, 3)
    writer.write_anchor(make_anchor(2, sha256s[1]))
    writer.write_anchor(make_anchor(3, sha256s[2]))
    raw_delete(store, *(commit_key(version) for version in (1, 2, 3)))
    for lost in (False, True):
        if lost:
            raw_delete(store, "head.json")
        assert Stream(store).head() == 3
    assert Stream(store).available() is None


def test_foreign_names_among_the_commits_are_passed_over(reader, store) -> None:
    raw_put(store, "commits/notes.json", b"x")
    raw_put(store, "commits/00000000000000000099.json.bak", b"x")
    raw_put(store, "commits/99.json", b"x")
    raw_delete(store, "head.json")
    assert reader.head() == 12
    assert reader.available() == (1, 12)


def test_a_store_that_does_not_answer_is_not_an_old_head(reader, counting, store) -> None:  # F78
    raw_delete(store, "head.json")
    for operation, key in (("get", "head.json"), ("list", "*"), ("stat", "commits/*")):
        counting.add(Fault(operation, key, effect=fail_before()))
        with pytest.raises(StoreUnavailable):
            reader.head()
    counting.add(Fault("stat", "commits/*", effect=fail_before()))
    with pytest.raises(StoreUnavailable):
        reader.head(12)
    counting.assert_fired()


def test_a_follower_waits_for_the_next_version(store, writer) -> None:
    write_chain(writer, 1, 1)
    faulty = FaultyStore(store, [Fault("stat", commit_key(2), effect=fail_before(), nth=2)])
    reader = Stream(faulty)
    reader.load()
    rounds = iter(range(10))

    def probe():
        if next(rounds) == 3:
            write_chain(writer, 2, 2)
        return reader.find_commit(2) if reader.head(1) == 2 else None

    found = poll(probe, phase="version 2", peer=store.url, timeout_s=60)
    assert found.commit.version == 2
    faulty.assert_fired()


def test_the_same_on_a_directory(tmp_path, store, writer) -> None:
    write_chain(writer, 1, 3)
    local = LocalStore(tmp_path, fsync=False)
    for key, data in raw(store).items():
        (local.put_hint if key == "head.json" else local.put_new)(key, data)
    reader = Stream(local)
    assert reader.head() == 3
    (tmp_path / "head.json").unlink()
    assert reader.head() == 3
    assert reader.available() == (1, 3)
    assert [item.commit.version for item in reader.commits(1, 3)] == [1, 2, 3]
