"""One rank: what a version is, and what happens when the store fails at every place it can."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, SteppedSource, edit, edited, initial, rows, same, write_checkpoint
from tests.publish.support import config
from torch_delta.capture.source import Collected, OwnedBox
from torch_delta.codec.change import Change
from torch_delta.errors import CaptureError, Fenced, PublishFailed, StoreUnavailable
from torch_delta.format.box import Box
from torch_delta.publish import attach_source
from torch_delta.store.local import LocalStore
from torch_delta.testing.faults import Fault, FaultyStore, call, fail_after, fail_before


@pytest.fixture
def base(tmp_path):
    return write_checkpoint(tmp_path / "base", initial())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "stream"


def faulty(root, *faults):
    return FaultyStore(LocalStore(root), list(faults))


def test_every_version_is_the_source_at_its_publish(root, base):
    # rule W2, C2: one version per publish, each naming the sha256 of the one before
    source = ArraySource()
    with attach_source(source, root, base=base, config=config()) as publisher:
        assert publisher.version == 0
        for seed in range(1, 5):
            edit(source, seed)
            assert publisher.publish() == seed
        report = publisher.wait(3)
        assert (report.version, report.num_elements, report.full_bytes) == (3, 68, 60 * 2 + 7 * 4 + 2)
        assert report.num_changed > 0
        assert report.stored_bytes > 0
    assert publisher.version == 4
    assert [r.version for r in publisher.reports] == [1, 2, 3, 4]
    states = reader.replay(root, initial())
    assert len(states) == 5
    for version, state in enumerate(states):
        assert same(state, edited(range(1, version + 1)))
    assert source.calls[-1] == ("close", 0)


def test_many_steps_between_versions_are_one_version(root, base):
    # rule W2, F03: the delta is against the last committed version, however many steps lie between
    source = ArraySource()
    with attach_source(source, root, base=base, config=config()) as publisher:
        for seed in (1, 2, 3):
            edit(source, seed)
        publisher.publish()
    states = reader.replay(root, initial())
    assert same(states[1], edited([1, 2, 3]))


def test_nothing_changed_is_a_version(root, base):
    # F02: an empty delta is still an explicit version
    source = ArraySource()
    with attach_source(source, root, base=base, config=config()) as publisher:
        publisher.publish()
        report = publisher.wait()
        edit(source, 1)
        source.live["a.weight"][...] = initial()["a.weight"]
        for name in ("b.bias", "c.scale"):
            source.live[name][...] = initial()[name]
        publisher.publish()  # went away and came back
    assert (report.version, report.num_changed, report.num_parts, report.stored_bytes) == (1, 0, 0, 0)
    assert report.times_smaller == float("inf")
    states = reader.replay(root, initial())
    assert len(states) == 3
    assert same(states[2], initial())


def test_an_upload_is_tried_again_under_another_name(root, base):
    store = faulty(root, Fault("put_new", "parts/*", nth=1, effect=fail_after()))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
    store.assert_fired()
    assert len(list((root / "parts").rglob("*.safetensors"))) == 2  # one is an orphan: its reply was lost
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_a_failed_upload_fails_the_version_and_the_next_covers_it(root, base):
    # rule W3, F01: the base of the diff advances only with a commit
    store = faulty(root, Fault("put_new", "parts/*", nth=1, effect=fail_before()))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config(num_put_attempts=1)) as publisher:
        edit(source, 1)
        publisher.publish()
        with pytest.raises(PublishFailed, match="version 1 was not committed: rank 0: StoreUnavailable") as caught:
            publisher.wait()
        assert caught.value.version == 1
        assert set(caught.value.failures) == {0}
        assert publisher.version == 0
        edit(source, 2)
        assert publisher.publish() == 1
        publisher.wait()
    store.assert_fired()
    assert same(reader.replay(root, initial())[1], edited([1, 2]))


def test_versions_in_flight_behind_a_failed_one_are_lost_with_it(root, base):
    gate = threading.Event()
    store = faulty(
        root,
        Fault("put_new", "parts/*", nth=1, effect=call(gate.wait)),
        Fault("put_new", "commits/*", nth=1, effect=fail_before(RuntimeError("a bug"))),
    )
    source = ArraySource()
    with attach_source(source, store, base=base, config=config(max_in_flight=3)) as publisher:
        for seed in (1, 2, 3):
            edit(source, seed)
            publisher.publish()
        gate.set()
        with pytest.raises(PublishFailed, match="a bug"):
            publisher.wait(1)
        edit(source, 4)
        assert publisher.version == 0
        report = publisher.wait(publisher.publish())
    assert report.version == publisher.version
    states = reader.replay(root, initial())
    assert same(states[-1], edited([1, 2, 3, 4]))
    assert source.calls.count(("rollback", 1)) + source.calls.count(("rollback", 2)) == 1


def test_a_lost_reply_to_a_commit_is_resolved(root, base):
    store = faulty(root, Fault("put_new", "commits/*", nth=1, effect=fail_after()))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
        assert publisher.wait().version == 1
    store.assert_fired()
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_a_store_that_is_down_for_a_while_delays_a_commit(root, base):
    store = faulty(root, *(Fault("put_new", "commits/*", nth=n, effect=fail_before()) for n in (1, 2, 3)))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config(commit_timeout_s=10.0)) as publisher:
        edit(source, 1)
        publisher.publish()
        publisher.wait()
    store.assert_fired()
    assert same(reader.replay(root, initial())[1], edited([1]))


@pytest.mark.parametrize("is_written", [True, False])
def test_an_unknown_outcome_is_settled_first(root, base, is_written):
    """The commit may exist; nothing is numbered on a guess, and its changes are neither lost nor sent twice."""
    down = threading.Event()

    def refuse():
        if down.is_set():
            raise StoreUnavailable("down", outcome="unknown")

    store = faulty(
        root,
        Fault("put_new", "commits/*", nth=1, effect=fail_after() if is_written else fail_before()),
        *(Fault("put_new", "commits/*", nth=n, effect=call(refuse)) for n in range(2, 200)),
        *(Fault("stat", "commits/00000000000000000001.json", nth=n, effect=call(refuse)) for n in range(1, 200)),
    )
    source = ArraySource()
    with attach_source(source, store, base=base, config=config()) as publisher:
        down.set()
        edit(source, 1)
        publisher.publish()
        with pytest.raises(PublishFailed, match="is not known") as caught:
            publisher.wait()
        assert caught.value.version == 1
        assert publisher.version == 0
        with pytest.raises(PublishFailed, match="is not known"):
            publisher.wait(1)  # still down
        down.clear()
        edit(source, 2)
        assert publisher.publish() == 2
        publisher.wait(2)
        assert [report.version for report in publisher.reports] == [1, 2]
    states = reader.replay(root, initial())
    assert same(states[1], edited([1]))
    assert same(states[2], edited([1, 2]))
    assert not [name for name, _ in source.calls if name == "rollback"]


def test_a_commit_that_was_certainly_not_written_is_given_up(root, base):
    """A full or read-only disk says so: the version fails, is not kept, and the next one covers it."""
    full = threading.Event()

    def refuse():
        if full.is_set():
            raise StoreUnavailable("no space left", outcome="absent")

    store = faulty(root, Fault("put_new", "commits/*", times=None, effect=call(refuse)))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config(commit_timeout_s=0.2)) as publisher:
        full.set()
        edit(source, 1)
        publisher.publish()
        with pytest.raises(PublishFailed, match="the commit could not be written: no space left") as caught:
            publisher.wait()
        assert list(caught.value.failures) == [0]
        full.clear()
        assert publisher.publish() == 1
        publisher.wait()
    store.assert_fired()
    assert ("rollback", 1) in source.calls
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_parts_are_readable_before_the_commit_exists(root, base):
    # rule K7
    seen = []

    def look():
        names = [path.relative_to(root).as_posix() for path in root.glob("parts/*/*.safetensors")]
        seen.append({name: (root / name).stat().st_size for name in names})

    store = faulty(root, Fault("put_new", "commits/*", effect=call(look), times=None))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config()) as publisher:
        for number in (1, 2):
            edit(source, number)
            publisher.publish()
            publisher.wait()
    store.assert_fired()
    for version in (1, 2):
        line = (root / "commits" / f"{version:020d}.json").read_bytes().split(b"\n")[0]
        parts = {part["key"]: part["bytes"] for part in json.loads(line)["parts"]}
        assert parts
        assert parts.items() <= seen[version - 1].items()


def test_close_settles_an_unknown_outcome(root, base):
    down = threading.Event()
    down.set()

    def refuse():
        if down.is_set():
            raise StoreUnavailable("down", outcome="unknown")

    store = faulty(root, *(Fault("put_new", "commits/*", nth=n, effect=call(refuse)) for n in range(1, 200)))
    source = ArraySource()
    publisher = attach_source(source, store, base=base, config=config())
    edit(source, 1)
    publisher.publish()
    with pytest.raises(PublishFailed):
        publisher.wait()
    down.clear()
    publisher.close()
    assert publisher.version == 1
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_the_second_writer_is_fenced_for_good(root, base):
    # rule W5: two writers never both win
    first, second = ArraySource(), ArraySource()
    loser = attach_source(second, root, base=base, config=config())
    with attach_source(first, root, base=base, config=config()) as winner:
        edit(first, 1)
        winner.wait(winner.publish())
    edit(second, 2)
    loser.publish()
    with pytest.raises(Fenced, match="version 1 was committed by another writer"):
        loser.wait()
    with pytest.raises(Fenced):
        loser.publish()
    with pytest.raises(Fenced):
        loser.anchor()
    loser.close()
    assert loser.version == 0
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_equal_changes_of_two_writers_are_not_the_same_commit(root, base):
    # rule W5: bytes that are not one's own are another writer's, even when they say the same
    first, second = ArraySource(), ArraySource()
    loser = attach_source(second, root, base=base, config=config())
    with attach_source(first, root, base=base, config=config()) as winner:
        winner.wait(winner.publish())
    loser.publish()
    with pytest.raises(Fenced):
        loser.wait()
    loser.close()


def test_too_many_versions_in_flight_wait(root, base):
    gate, waiting = threading.Event(), threading.Event()
    store = faulty(root, Fault("put_new", "parts/*", nth=1, effect=call(gate.wait)))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config(max_in_flight=2)) as publisher:
        for seed in (1, 2):
            edit(source, seed)
            publisher.publish()  # returns although nothing is uploaded
        assert publisher.version == 0
        # The third needs the first: it can only return after the gate opened.
        threading.Timer(0.05, lambda: (waiting.set(), gate.set())).start()
        edit(source, 3)
        publisher.publish()
        assert waiting.is_set()
        report = publisher.wait(3)
    assert report.back_pressure_s > 0
    assert publisher.reports[0].back_pressure_s < report.back_pressure_s
    assert same(reader.replay(root, initial())[3], edited([1, 2, 3]))


def test_what_names_an_object_is_written_after_it(root, base):
    # rule W6: the schema before stream.json, the parts before the commit, the commit before the hint
    def all_there(pattern, num):
        return call(lambda: seen.append(len(list(root.glob(pattern))) == num))

    seen = []
    store = faulty(
        root,
        Fault("put_new", "stream.json", effect=all_there("schema/*.json", 1)),
        Fault("put_new", "commits/*", effect=all_there("parts/*/*.safetensors", 1)),
        Fault("put_hint", "head.json", effect=all_there("commits/*.json", 1)),
    )
    source = ArraySource()
    with attach_source(source, store, base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
    store.assert_fired()
    assert seen == [True, True, True]
    assert reader.sealed(root / "head.json")["version"] == 1


def test_a_lost_hint_is_not_an_error(root, base):
    store = faulty(root, Fault("put_hint", "head.json", nth=1, effect=fail_before()))
    source = ArraySource()
    with attach_source(source, store, base=base, config=config()) as publisher:
        publisher.wait(publisher.publish())
    store.assert_fired()
    assert reader.versions(root) == [1]


def test_steps_publish_by_themselves_and_raise_what_went_wrong(root, base):
    store = faulty(root, Fault("put_new", "parts/*", nth=2, effect=fail_before()))
    source = SteppedSource()
    collect, collected = source.collect, {}

    def remember():
        found = collect()
        collected[found.token] = {name: bits.copy() for name, bits in source.live.items()}
        return found

    source.collect = remember
    failed = []
    with attach_source(
        source, store, base=base, config=config(every=2, num_put_attempts=1, max_in_flight=1)
    ) as publisher:
        for seed in range(1, 1000):
            edit(source, seed)
            try:
                source.step()
            except PublishFailed as error:
                failed.append(error.version)
            if publisher.version == 3:
                break
    assert failed == [2]
    states = reader.replay(root, initial())
    committed = [token for name, token in source.calls if name == "commit"]
    assert len(states) == 1 + len(committed) >= 4
    for version, token in enumerate(committed, start=1):
        assert same(states[version], collected[token])


def test_a_source_that_cannot_collect_fails_the_version(root, base):
    source = ArraySource()
    collect, source.collect = source.collect, lambda: (_ for _ in ()).throw(CaptureError("in the middle of a step"))
    with attach_source(source, root, base=base, config=config()) as publisher:
        publisher.publish()
        with pytest.raises(PublishFailed, match="CaptureError: in the middle of a step"):
            publisher.wait()
        source.collect = collect
        edit(source, 1)
        publisher.wait(publisher.publish())
    assert same(reader.replay(root, initial())[1], edited([1]))


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([Box((0, 0), (11, 6))], "encoding failed|outside"),
        ([Box((2, 0), (2, 6)), Box((3, 0), (2, 6))], "overlap"),
        ([Box((5, 0), (2, 6))], r"a\.weight: rank 0 sent \[5:7, 0:6\], which it does not own"),
    ],
)
def test_slices_that_are_not_owned_once_are_refused(root, base, boxes, said):
    # rule W4, F60, F39: every change is covered exactly once, and the committer proves it
    source = ArraySource()
    tops = [("a.weight", Box((0, 0), (5, 6))), ("a.weight", Box((5, 0), (1, 6))), ("a.weight", Box((6, 0), (4, 6)))]
    source.owned = tuple(OwnedBox(tensor=source.schema.index(name), box=box) for name, box in tops + rows(0, 1)[1:])
    collect = source.collect

    def lie():
        collected = collect()
        one = np.zeros(1, np.uint32)
        bits = np.ones(1, np.uint16)
        changes = tuple(Change(tensor=0, box=box, index=one, old=bits, new=bits + bits) for box in boxes)
        return Collected(token=collected.token, changes=changes, num_changed=1)

    with attach_source(source, root, base=base, config=config()) as publisher:
        source.collect = lie
        publisher.publish()
        with pytest.raises(PublishFailed, match=said):
            publisher.wait()
        source.collect = collect
        edit(source, 1)
        publisher.wait(publisher.publish())
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_a_closed_publisher_says_so(root, base):
    publisher = attach_source(ArraySource(), root, base=base, config=config())
    publisher.close()
    publisher.close()
    publisher.detach()
    for use in (publisher.publish, publisher.wait, publisher.anchor):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_waiting_for_what_was_never_published(root, base):
    with attach_source(ArraySource(), root, base=base, config=config()) as publisher:
        with pytest.raises(ValueError, match="version 1 was not published yet, the newest is 0"):
            publisher.wait(1)
        with pytest.raises(ValueError, match="version 0 was not published by this publisher"):
            publisher.wait()


def test_an_error_in_the_block_is_not_hidden(root, base):
    gate = threading.Event()
    store = faulty(root, Fault("put_new", "parts/*", nth=1, effect=call(gate.wait)))
    source = ArraySource()
    publisher = attach_source(source, store, base=base, config=config())

    def block():
        with publisher:
            edit(source, 1)
            publisher.publish()
            gate.set()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        block()
    assert source.calls[-1] == ("close", 0)


def test_parts_open_with_safetensors_and_large_changes_make_several(root, base, monkeypatch):
    from safetensors import safe_open

    from torch_delta.publish import pipeline

    monkeypatch.setattr(pipeline, "_MAX_CHANGES", 1)
    source = ArraySource()
    with attach_source(source, root, base=base, config=config(num_encode_threads=2)) as publisher:
        edit(source, 1)
        publisher.publish()
        report = publisher.wait()
    assert report.num_parts == 3
    for part in (root / "parts").rglob("*.safetensors"):
        with safe_open(part, framework="pt") as opened:
            assert "table" in opened.keys()  # noqa: SIM118
    assert same(reader.replay(root, initial())[1], edited([1]))


def test_absolute_only_streams_hold_no_relative_encodings(root, base):
    source = ArraySource()
    with attach_source(source, root, base=base, config=config(absolute_only=True)) as publisher:
        for bits in source.live.values():
            bits[...] ^= 1
        publisher.publish()
    assert reader.sealed(root / "stream.json")["absolute_only"] is True
    for part in (root / "parts").rglob("*.safetensors"):
        assert "xor" not in reader.tensors_of(part.read_bytes())
    with pytest.raises(Exception, match="absolute-only"):
        attach_source(ArraySource(), root, base=base, config=config())


def test_the_shared_map_does_not_grow(root, base):
    source = ArraySource()
    with attach_source(source, root, base=base, config=config()) as publisher:
        sizes = []
        for seed in range(20):
            edit(source, seed)
            publisher.wait(publisher.publish())
            sizes.append(len(publisher._team.kv._values))
    assert max(sizes[10:]) <= max(sizes[:10])


def test_what_a_killed_writer_left_is_swept_when_another_attaches(tmp_path):
    """F84."""
    folder = tmp_path / "parts" / "00000000000000000001"
    folder.mkdir(parents=True)
    for name, age_s in (("old", 90_000.0), ("fresh", 60.0)):
        path = folder / f".tmp-{name}"
        path.write_bytes(b"half a part")
        os.utime(path, (time.time() - age_s,) * 2)
    with attach_source(ArraySource(), tmp_path, config=config()) as publisher:
        publisher.publish()
        publisher.wait()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".tmp-")] == [".tmp-fresh"]
