"""Retention: what goes, what stays, in which order, and who may delete."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.stream.samples import (
    NONCE,
    OTHER_ID,
    SCHEMA,
    STREAM_ID,
    commit_key,
    fields_of,
    make_anchor,
    make_info,
    raw,
    raw_delete,
    seal,
    write_chain,
)
from torch_delta import crashpoints
from torch_delta.config import RetentionConfig
from torch_delta.errors import FormatError, StoreUnavailable
from torch_delta.format.keys import parse_claim_key, parse_lease_key, part_key
from torch_delta.format.lease import Claim, Lease
from torch_delta.store import LocalStore, MemoryStore, Store
from torch_delta.stream import Stream
from torch_delta.stream.claim import take_claim
from torch_delta.stream.collect import collect_garbage
from torch_delta.stream.forks import note_fork
from torch_delta.testing.faults import Fault, FaultyStore, call, fail_before

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def fill(store: Store, *, last: int = 12, anchors: tuple[int, ...] = (3, 6, 9)) -> Stream:
    """A stream whose commits have their parts, and anchors with one file."""
    stream = Stream(store)
    stream.create(make_info(), SCHEMA)
    for version in range(1, last + 1):
        store.put_new(part_key(version, 0, 0, NONCE), b"x" * 10)
    sha256s = write_chain(stream, 1, last)
    for number, version in enumerate(anchors):
        add_anchor(stream, version, sha256s[version - 1] if version else stream.info_sha256, number)
    return stream


def add_anchor(stream: Stream, version: int, sha256: str, number: int) -> None:
    manifest = make_anchor(version, sha256, nonce=f"{number:016x}")
    stream.store.put_new(manifest.files[0].key, b"w")
    stream.write_anchor(manifest)


def age(store: MemoryStore, key: str, seconds: float) -> None:
    """Make an object older, by the store's clock."""
    data, created_s = store._shelf.objects[key]
    store._shelf.objects[key] = (data, created_s - seconds)


def versions(store: Store) -> list[int]:
    return [int(item.key[8:28]) for item in store.list("commits/")]


def part_versions(store: Store) -> list[int]:
    return [int(item.key[6:26]) for item in store.list("parts/")]


def anchor_versions(store: Store) -> list[int]:
    return [int(item.key[8:28]) for item in store.list("anchors/") if item.key.count("/") == 1]


def lease(stream: Stream, version: int, **changes: object) -> Lease:
    fields = {"nonce": "e" * 16, "stream_id": STREAM_ID, "version": version, "anchor": None, "seconds": 600}
    written = Lease(**{**fields, **changes})
    stream.store.put_hint(written.key, written.to_bytes())
    return written


def test_the_newest_two_anchors_and_all_after_them_stay() -> None:
    # rules A6, L1; F85: current and previous anchor, with whole chains
    store = MemoryStore()
    stream = fill(store)
    report = collect_garbage(stream)
    assert (report.floor, report.versions, report.anchors) == (6, (1, 2, 3, 4, 5), (3,))
    assert versions(store) == part_versions(store) == [6, 7, 8, 9, 10, 11, 12]
    assert anchor_versions(store) == [6, 9]
    assert report.freed_bytes == 5 * 10 + 1 + len(make_anchor(3, "0" * 64, nonce=f"{0:016x}").to_bytes())
    again = collect_garbage(stream)
    assert (again.versions, again.anchors, again.freed_bytes, again.failures) == ((), (), 0, ())
    assert again.kept_bytes == report.kept_bytes


@pytest.mark.parametrize("anchors", [(), (9,), (0,)])
def test_with_fewer_than_two_anchors_nothing_goes(anchors: tuple[int, ...]) -> None:
    # rule L1
    store = MemoryStore()
    report = collect_garbage(fill(store, anchors=anchors))
    assert report.floor is None
    assert versions(store) == [*range(1, 13)]


@pytest.mark.parametrize("damage", ["file gone", "file cut", "manifest damaged"])
def test_an_anchor_that_is_not_whole_does_not_count(damage: str) -> None:
    # rule L1
    store = MemoryStore()
    stream = fill(store, anchors=(2, 3, 6, 9))
    folder = f"anchors/{9:020d}-{3:016x}"
    if damage == "manifest damaged":
        store._shelf.objects[f"{folder}.json"] = (b"{}\n", 0.0)
    else:
        raw_delete(store, f"{folder}/model.safetensors")
        if damage == "file cut":
            store.put_new(f"{folder}/model.safetensors", b"")
    assert collect_garbage(stream).floor == 3


def test_live_readers_hold_back_what_they_need() -> None:
    # rule L2; F87
    store = MemoryStore()
    stream = fill(store, anchors=(2, 3, 6, 9))
    held = lease(stream, 4, anchor=f"anchors/{2:020d}-{0:016x}.json")
    report = collect_garbage(stream)
    assert (report.floor, report.versions, report.anchors, report.num_live_leases) == (3, (1, 2), (), 1)
    assert anchor_versions(store) == [2, 3, 6, 9], "the one it reads stays, and those after its version"
    age(store, held.key, 601)
    report = collect_garbage(stream)
    assert (report.floor, report.num_live_leases, report.num_expired_leases) == (6, 0, 1)
    assert (versions(store)[0], anchor_versions(store)) == (6, [6, 9])
    assert held.key not in raw(store)


def test_a_lease_of_another_stream_or_a_damaged_one_is_none() -> None:
    # rule L2
    store = MemoryStore()
    stream = fill(store)
    foreign = lease(stream, 1, stream_id=OTHER_ID)
    store.put_hint(f"leases/{'d' * 16}.json", b"{}\n")
    report = collect_garbage(stream)
    assert (report.floor, report.num_live_leases, report.num_expired_leases) == (6, 0, 0)
    assert foreign.key in raw(store), "kept for the grace period: somebody may be looking at it"


def test_no_host_clock_matters() -> None:
    # rule L3: the store is an hour, or a year, away from this host
    store = MemoryStore()
    stream = fill(store)
    lease(stream, 1, seconds=600)
    orphan = part_key(12, 7, 0, "f" * 16)
    store.put_new(orphan, b"o")
    for key in raw(store):
        age(store, key, -365 * DAY_S)
    real = store.put_new

    def put_new(key: str, data: bytes) -> object:  # what the store writes from now on has its clock too
        info = real(key, data)
        age(store, key, -365 * DAY_S)
        return info

    store.put_new = put_new  # type: ignore[method-assign]
    report = collect_garbage(stream)
    assert (report.num_live_leases, report.num_orphans, report.versions) == (1, 0, ())
    assert orphan in raw(store)


def test_orphans_go_after_the_grace_period_and_never_sooner() -> None:
    # rule L5; F84
    store = MemoryStore()
    stream = fill(store, anchors=(6, 9))
    old = [
        part_key(12, 7, 0, "a" * 16),
        part_key(13, 0, 0, "a" * 16),
        f"anchors/{11:020d}-{'a' * 16}/model.safetensors",
    ]
    old.append(f"anchors/{9:020d}-{1:016x}/stage-00001-00000")
    young = [part_key(12, 8, 0, "b" * 16), part_key(14, 0, 0, "b" * 16), f"anchors/{12:020d}-{'b' * 16}/x.safetensors"]
    for key in (*old, *young):
        store.put_new(key, b"orphan")
    for key in raw(store):
        if key not in young:
            age(store, key, DAY_S + 60)  # named parts and files are old as well, and stay
    before = set(raw(store))
    report = collect_garbage(stream)
    gone = before - set(raw(store))
    assert {key for key in gone if "a" * 16 in key or "stage" in key} == set(old)
    assert all(int(key[8:28]) < 6 for key in gone - set(old) if key.startswith("commits/"))
    assert report.num_orphans == len(old)
    assert set(young) <= set(raw(store))


def test_a_deletion_that_was_cut_short_is_finished_at_once() -> None:
    # rules K6, L5
    store = MemoryStore()
    stream = fill(store)
    raw_delete(store, commit_key(1), commit_key(2))
    report = collect_garbage(stream)
    assert (report.versions, report.num_orphans) == ((3, 4, 5), 2)
    assert part_versions(store)[0] == 6


def test_a_commit_that_cannot_be_read_keeps_its_parts() -> None:
    store = MemoryStore()
    fill(store)
    stray = part_key(10, 3, 0, "c" * 16)
    store.put_new(stray, b"?")
    age(store, stray, DAY_S + 60)
    age(store, part_key(10, 0, 0, NONCE), DAY_S + 60)
    store._shelf.objects[commit_key(10)] = (b"damaged", 0.0)
    report = collect_garbage(Stream(store))
    assert stray in raw(store)
    assert part_key(10, 0, 0, NONCE) in raw(store)
    assert "version 10 were not looked at" in report.failures[0]


def test_a_dry_run_says_the_same_and_writes_nothing() -> None:
    store = MemoryStore()
    stream = fill(store)
    before = raw(store)
    said = collect_garbage(stream, dry_run=True)
    assert raw(store) == before
    done = collect_garbage(stream)
    same = ("floor", "versions", "anchors", "num_orphans", "freed_bytes", "kept_bytes")
    assert [getattr(said, name) for name in same] == [getattr(done, name) for name in same]
    assert said.dry_run
    assert not done.dry_run


def test_the_budget_is_compared() -> None:
    stream = fill(MemoryStore())
    kept = collect_garbage(stream, RetentionConfig(budget_bytes=1_000_000)).kept_bytes
    report = collect_garbage(stream, RetentionConfig(budget_bytes=kept - 5))
    assert (report.over_budget_bytes, report.budget_bytes) == (5, kept - 5)


def test_a_delete_that_fails_is_noted_and_leaves_no_hole() -> None:
    # F88
    inner = MemoryStore()
    fill(inner)
    store = FaultyStore(inner, [Fault("delete", commit_key(3), effect=fail_before())])
    report = collect_garbage(Stream(store))
    store.assert_fired()
    assert (report.versions, len(report.failures)) == ((1, 2), 1)
    assert versions(inner) == [*range(3, 13)]
    assert part_versions(inner) == [*range(3, 13)]
    assert collect_garbage(Stream(inner)).versions == (3, 4, 5)


def test_a_listing_that_fails_deletes_nothing() -> None:
    # F78: an error is never an empty listing
    inner = MemoryStore()
    fill(inner)
    for prefix in ("commits/", "parts/", "anchors/", "leases/"):
        before = {key for key in raw(inner) if not key.startswith("claims/")}
        store = FaultyStore(inner, [Fault("list", prefix, effect=fail_before())])
        with pytest.raises(StoreUnavailable):
            collect_garbage(Stream(store))
        store.assert_fired()
        assert {key for key in raw(inner) if not key.startswith("claims/")} == before


def test_one_deleter_at_a_time() -> None:
    # rule L4; F88
    store = MemoryStore()
    stream = fill(store)
    other = take_claim(store, STREAM_ID, seconds=600)
    assert not isinstance(other, str)
    report = collect_garbage(stream)
    assert report.holder is not None
    assert f"pid {os.getpid()}" in report.holder
    assert versions(store)[0] == 1
    age(store, other.claim.key, 601)  # it died
    assert collect_garbage(stream).versions == (1, 2, 3, 4, 5)
    assert [key for key in raw(store) if key.startswith("claims/")] == [f"claims/{1:020d}.json"]
    released = take_claim(store, STREAM_ID, seconds=600)
    assert not isinstance(released, str)
    released.release()
    assert collect_garbage(stream).holder is None


def test_two_that_claim_at_the_same_moment() -> None:
    # rule L4
    inner = MemoryStore()
    fill(inner)
    rivals = []
    store = FaultyStore(
        inner,
        [Fault("put_new", "claims/*", effect=call(lambda: rivals.append(take_claim(inner, STREAM_ID, seconds=60))))],
    )
    report = collect_garbage(Stream(store))
    assert not isinstance(rivals[0], str)
    assert report.holder == "somebody who claimed it at the same moment"
    assert versions(inner)[0] == 1


@pytest.mark.parametrize("changes", [{"seconds": 0}, {"seconds": 604_801}, {"version": -1}])
def test_leases_are_bounded(changes: dict[str, int]) -> None:
    # rule L2, rule L4
    fields = fields_of(
        Lease(nonce="e" * 16, stream_id=STREAM_ID, version=1, anchor=None, seconds=1, info={}).to_bytes()
    )
    with pytest.raises(FormatError):
        Lease.from_bytes(seal({**fields, **changes}), key=f"leases/{'e' * 16}.json")
    if "seconds" in changes:
        claim = json.loads(Claim(number=0, stream_id=STREAM_ID, seconds=1, done=False).to_bytes().splitlines()[0])
        with pytest.raises(FormatError, match="rule L4"):
            Claim.from_bytes(seal({**claim, **changes}), key=f"claims/{0:020d}.json")


def test_a_lease_names_a_manifest_and_nothing_else() -> None:
    # rule L2, rule K3
    with pytest.raises(FormatError, match="not the key of an anchor"):
        Lease(nonce="e" * 16, stream_id=STREAM_ID, version=1, anchor="parts/x", seconds=1)
    for parse, key in ((parse_lease_key, "leases/x.json"), (parse_claim_key, f"claims/{'e' * 16}.json")):
        with pytest.raises(FormatError, match="rule K3"):
            parse(key)


KILLED = """
import sys
from torch_delta.store import LocalStore
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage
from torch_delta.config import RetentionConfig
collect_garbage(Stream(LocalStore(sys.argv[1])), RetentionConfig(grace_s=0, claim_s=1))
"""


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", sorted(p for p in crashpoints.POINTS if p.startswith("gc.")))
def test_killed_anywhere_the_stream_can_be_read(tmp_path, point: str, nth: int) -> None:
    # rules K6, A6, L6
    fork, tmp_path = tmp_path / "run-0a1b2c3d", tmp_path / "run"
    stream = fill(LocalStore(tmp_path), anchors=(2, 3, 6, 9))
    note_fork(stream, fork.name, OTHER_ID)
    for key in (f"anchors/{0:020d}-{NONCE}/model.safetensors", f"schema/{SCHEMA.id}.json"):
        LocalStore(fork).put_new(key, b"begun")
    for path in [*fork.rglob("*"), *tmp_path.glob("forks/*")]:
        os.utime(path, (1, 1))
    for seq in (1, 2):
        stream.store.put_new(part_key(13, 0, seq, "a" * 16), b"orphan")
    for path in tmp_path.glob("parts/*13/*"):
        os.utime(path, (1, 1))
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, crashpoints.ENVIRONMENT: f"{point}:{nth}:kill"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode == -9) == (nth == 1 or point != "gc.claimed"), run.stderr
    left = Stream(LocalStore(tmp_path))
    assert left.head() == 12
    present = versions(left.store)
    assert present == [*range(present[0], 13)], "no hole"
    assert present[0] <= 6
    assert set(present) <= set(part_versions(left.store)), "a commit has its parts"
    for anchor in left.anchors():
        for file in left.anchor(anchor).files:
            left.store.stat(file.key)
    # The next deleter finishes what was begun, once the dead one's claim has run out.
    for path in tmp_path.glob("claims/*"):
        os.utime(path, (1, 1))
    report = collect_garbage(left, RetentionConfig(grace_s=0))
    assert report.holder is None
    assert versions(left.store) == part_versions(left.store) == [*range(6, 13)]
    assert anchor_versions(left.store) == [6, 9]
    assert not [item.key for item in left.store.list("anchors/") if int(item.key[8:28]) < 6]
    assert [*LocalStore(fork).list(), *left.store.list("forks/")] == []
