"""Commits, anchors and successors: the chain, the fence, and what a second writer or a lost reply does."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.stream.samples import (
    NONCE,
    OTHER_ID,
    SCHEMA,
    STREAM_ID,
    commit_key,
    make_anchor,
    make_commit,
    raw,
    raw_delete,
    raw_put,
    write_chain,
)
from torch_delta import crashpoints
from torch_delta.errors import ChainError, Fenced, FormatError, ObjectNotFound, StoreUnavailable
from torch_delta.format.head import Successor
from torch_delta.stream import Stream
from torch_delta.testing import Crash, Fault, FaultyStore
from torch_delta.testing.faults import crash_after, fail_after, fail_before, flip_bit, truncate


def test_a_chain_is_read_as_it_was_written(store, writer) -> None:
    sha256s = write_chain(writer, 1, 3)
    assert sha256s == [hashlib.sha256(raw(store)[commit_key(version)]).hexdigest() for version in (1, 2, 3)]
    reader = Stream(store)
    found = [*reader.commits(1, 3)]
    assert [item.sha256 for item in found] == sha256s
    assert [item.commit.version for item in found] == [1, 2, 3]
    assert [item.commit.parent_sha256 for item in found] == [reader.info_sha256, *sha256s[:2]]
    commit, sha256 = reader.commit(2)
    assert (commit, sha256) == (found[1].commit, sha256s[1])


def test_a_missing_commit(store, writer) -> None:
    write_chain(writer, 1, 2)
    assert Stream(store).find_commit(3) is None
    with pytest.raises(ChainError, match="there is no commit of version 3") as caught:
        Stream(store).commit(3)
    assert (caught.value.facts["missing"], caught.value.facts["target"]) == (3, 3)
    raw_delete(store, commit_key(1))
    with pytest.raises(ChainError) as caught:
        [*Stream(store).commits(1, 2)]
    assert caught.value.facts["missing"] == 1


@pytest.mark.parametrize("effect", [flip_bit(byte=40), flip_bit(byte=-1), truncate(50), truncate(0)])
def test_a_commit_that_is_damaged_on_the_way_is_refused_and_read_again(store, writer, effect) -> None:  # rule R4
    (sha256,) = write_chain(writer, 1, 1)
    faulty = FaultyStore(store, [Fault("get", commit_key(1), effect=effect)])
    reader = Stream(faulty)
    with pytest.raises(FormatError) as caught:
        reader.commit(1)
    assert caught.value.facts["rule"] == "J1"
    assert reader.commit(1).sha256 == sha256
    faulty.assert_fired()


def test_a_commit_under_another_versions_name(store, writer) -> None:  # rule R4
    write_chain(writer, 1, 2)
    raw_put(store, commit_key(3), raw(store)[commit_key(2)])
    with pytest.raises(FormatError) as caught:
        Stream(store).commit(3)
    assert caught.value.facts["rule"] == "C1"


def test_a_fork_is_noticed_by_whoever_holds_the_parent(store, writer) -> None:  # rule C2
    write_chain(writer, 1, 2)
    reader = Stream(store)
    held = reader.commit(1).sha256
    forked = make_commit(2, "f" * 64, nonce="fork")
    raw_put(store, commit_key(2), forked.to_bytes())
    with pytest.raises(ChainError, match="forks from another history") as caught:
        reader.commit(2)
    assert (caught.value.facts["expected"], caught.value.facts["got"]) == (held, "f" * 64)
    with pytest.raises(ChainError):
        Stream(store).commit(2, parent_sha256=held)
    assert Stream(store).commit(2).commit == forked  # who does not hold version 1 cannot know yet
    raw_put(store, commit_key(1), make_commit(1, "e" * 64).to_bytes())
    with pytest.raises(ChainError):  # version 1 always can be checked: its parent is stream.json
        Stream(store).commit(1)


def test_a_replaced_commit_is_noticed_by_whoever_read_it(store, writer) -> None:  # rule K4
    write_chain(writer, 1, 1)
    raw_put(store, commit_key(1), make_commit(1, writer.info_sha256, nonce="rewritten").to_bytes())
    with pytest.raises(ChainError, match="history was rewritten"):
        writer.commit(1)


def test_a_commit_needs_its_parent(store, writer) -> None:
    for version, parent in ((2, "0" * 64), (1, "0" * 64)):
        with pytest.raises(ChainError):
            writer.write_commit(make_commit(version, parent))
    assert Stream(store).head() == 0


def test_a_restarted_writer_reads_the_parent_it_does_not_remember(store, writer) -> None:
    (sha256,) = write_chain(writer, 1, 1)
    restarted = Stream(store)
    with pytest.raises(ChainError):
        restarted.write_commit(make_commit(2, "0" * 64))
    restarted.write_commit(make_commit(2, sha256))
    assert Stream(store).head() == 2


def test_of_two_writers_one_wins_and_the_other_is_told_who(store, writer) -> None:  # rule W5
    second = Stream(store)
    second.load()
    writer.write_commit(make_commit(1, writer.info_sha256, nonce="the first writer"))
    before = raw(store)
    with pytest.raises(Fenced, match="nonce=the first writer") as caught:
        second.write_commit(make_commit(1, writer.info_sha256, nonce="the second writer"))
    assert caught.value.facts["version"] == 1
    assert "the first writer" in caught.value.facts["owner"]
    assert raw(store) == before
    # Both still work: the winner goes on, the loser can read.
    write_chain(writer, 2, 2)
    assert second.head() == 2


def test_racing_writers(store, writer) -> None:
    start = threading.Barrier(8)

    def write(number: int) -> str:
        start.wait(60)
        try:
            Stream(store).write_commit(make_commit(1, writer.info_sha256, nonce=str(number)))
        except Fenced:
            return "fenced"
        return "won"

    with ThreadPoolExecutor(8) as pool:
        outcomes = [*pool.map(write, range(8))]
    assert sorted(outcomes) == ["fenced"] * 7 + ["won"]
    assert Stream(store).commit(1).commit.info["nonce"] == str(outcomes.index("won"))


def test_a_commit_whose_reply_was_lost_is_settled_by_repeating_it(store, writer) -> None:  # rule K4
    faulty = FaultyStore(
        store,
        [Fault("put_new", "commits/*", effect=fail_after()), Fault("stat", commit_key(1), effect=fail_before())],
    )
    stream = Stream(faulty)
    commit = make_commit(1, stream.info_sha256)
    with pytest.raises(StoreUnavailable) as caught:
        stream.write_commit(commit)
    assert caught.value.facts["outcome"] == "unknown"
    assert stream.write_commit(commit) == hashlib.sha256(raw(store)[commit_key(1)]).hexdigest()
    faulty.assert_fired()


def test_a_crash_before_or_after_the_create_leaves_nothing_or_the_version(store, writer) -> None:
    commit = make_commit(1, writer.info_sha256)

    def die() -> None:
        raise Crash

    with pytest.raises(Crash), crashpoints.armed("stream.commit_written", die):
        writer.write_commit(commit)
    assert Stream(store).head() == 1  # committed, though its writer never learned
    Stream(store).write_commit(commit)
    faulty = FaultyStore(store, [Fault("put_hint", effect=crash_after())])
    with pytest.raises(Crash):
        Stream(faulty).write_head(1, Stream(store).commit(1).sha256)
    assert Stream(store).head() == 1


def test_many_commits_are_not_all_remembered(store, writer, monkeypatch) -> None:
    monkeypatch.setattr("torch_delta.stream.stream._MOST_REMEMBERED_COMMITS", 4)
    write_chain(writer, 1, 10)
    reader = Stream(store)
    [*reader.commits(1, 10)]
    assert len(reader._sha256) == 4
    assert reader.commit(10).commit.version == 10


# Anchors


def test_an_anchor_exists_with_its_manifest(store, writer) -> None:  # rule A1
    sha256s = write_chain(writer, 1, 2)
    folder = f"anchors/{2:020d}-{NONCE}"
    raw_put(store, f"{folder}/model.safetensors", b"x")  # all its files are there
    raw_put(store, f"{folder}/README.md", b"x")
    raw_put(store, "anchors/notes.json", b"not a manifest")
    assert writer.anchors() == ()
    writer.write_anchor(make_anchor(2, sha256s[1]))
    writer.write_anchor(make_anchor(2, sha256s[1]))
    writer.write_anchor(make_anchor(0, None, nonce="f" * 16))
    writer.write_anchor(make_anchor(2, sha256s[1], nonce="0" * 16))
    found = Stream(store).anchors()
    assert [(anchor.version, anchor.nonce) for anchor in found] == [(0, "f" * 16), (2, "0" * 16), (2, NONCE)]
    assert Stream(store).anchor(found[2]) == make_anchor(2, sha256s[1])


def test_an_anchor_of_another_stream_or_history_is_refused(store, writer) -> None:
    sha256s = write_chain(writer, 1, 1)
    foreign = make_anchor(1, sha256s[0], stream_id=OTHER_ID)
    with pytest.raises(FormatError) as caught:
        writer.write_anchor(foreign)
    assert caught.value.facts["rule"] == "I2"
    raw_put(store, foreign.key, foreign.to_bytes())
    (anchor,) = writer.anchors()
    with pytest.raises(FormatError) as caught:
        writer.anchor(anchor)
    assert caught.value.facts["rule"] == "I2"
    raw_put(store, foreign.key, make_anchor(1, "f" * 64).to_bytes())
    with pytest.raises(FormatError) as caught:  # rule A2
        writer.anchor(anchor)
    assert (caught.value.facts["rule"], caught.value.facts["expected"]) == ("A2", sha256s[0])
    raw_delete(store, foreign.key)
    with pytest.raises(ObjectNotFound):
        writer.anchor(anchor)


# Successors


def make_successor(version: int, sha256: str, root: str = "run-8", stream_id: str = STREAM_ID) -> Successor:
    return Successor(stream_id=stream_id, version=version, commit_sha256=sha256, root=root, successor_id=OTHER_ID)


def test_a_successor_fences_the_old_writer(store, writer) -> None:  # rule N3
    (sha256,) = write_chain(writer, 1, 1)
    other = Stream(store)
    other.write_successor(make_successor(1, sha256))
    other.write_successor(make_successor(1, sha256))
    with pytest.raises(Fenced, match=r"ended by successor\.json"):
        writer.write_commit(make_commit(2, sha256))
    with pytest.raises(Fenced, match="continued elsewhere"):
        writer.write_successor(make_successor(1, sha256, root="run-9"))
    assert Stream(store).head() == 1
    assert Stream(store).successor() == make_successor(1, sha256)


def test_a_successor_of_another_stream_is_refused(store, writer) -> None:
    raw_put(
        store,
        "successor.json",
        Successor(
            stream_id=OTHER_ID, version=0, commit_sha256="0" * 64, root="run-8", successor_id="1" * 32
        ).to_bytes(),
    )
    with pytest.raises(FormatError) as caught:
        Stream(store).successor()
    assert caught.value.facts["rule"] == "I2"


def test_the_schema_is_shared_not_copied(writer) -> None:
    assert writer.load()[1] is SCHEMA
