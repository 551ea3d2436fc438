"""What a writer that was killed while it forked a stream left beside it: found, and never taken for anything else."""

from __future__ import annotations

import pytest

from tests.stream.samples import DIGESTS, NONCE, OTHER_ID, SCHEMA, STREAM_ID, make_anchor, make_info, raw, seal
from tests.stream.test_retention import DAY_S, HOUR_S, age, fill
from torch_delta.config import RetentionConfig
from torch_delta.errors import StoreError, StoreUnavailable
from torch_delta.format.fork import ForkNote
from torch_delta.format.head import Successor
from torch_delta.format.streaminfo import BaseInfo, StreamInfo
from torch_delta.store import MemoryStore
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage
from torch_delta.stream.forks import note_fork, refuse_if_swept
from torch_delta.testing.faults import Fault, FaultyStore, fail_before

ROOT = "run-0a1b2c3d"
FILE = f"anchors/{0:020d}-{NONCE}/model.safetensors"
MANIFEST = f"anchors/{0:020d}-{NONCE}.json"


def begin(stream: Stream, *, stage: str) -> tuple[ForkNote, MemoryStore]:
    """A fork that got as far as `stage`, all of it a day and an hour old."""
    note = note_fork(stream, ROOT, OTHER_ID)
    beside = stream.store.sibling(ROOT)
    stages = ["noted", "file", "manifest", "schema", "stream"]
    done = stages[: stages.index(stage) + 1]
    if "file" in done:
        beside.put_new(FILE, b"w")
    if "manifest" in done:
        manifest = make_anchor(0, None, stream_id=OTHER_ID)
        beside.put_new(manifest.key, manifest.to_bytes())
    if "stream" in done:
        base = BaseInfo(kind="stream", name=STREAM_ID, revision="12", digests=DIGESTS)
        Stream(beside).create(StreamInfo(stream_id=OTHER_ID, schema_id=SCHEMA.id, base=base), SCHEMA)
    elif "schema" in done:
        beside.put_new(f"schema/{SCHEMA.id}.json", SCHEMA.to_bytes())
    for store in (stream.store, beside):
        for key in raw(store):
            age(store, key, DAY_S + HOUR_S)
    return note, beside


def end(stream: Stream, root: str, successor_id: str = OTHER_ID) -> None:
    stream.write_successor(
        Successor(
            stream_id=STREAM_ID,
            version=0,
            commit_sha256=stream.info_sha256,
            root=root,
            successor_id=successor_id,
        )
    )


@pytest.mark.parametrize("stage", ["noted", "file", "manifest", "schema", "stream"])
@pytest.mark.parametrize("continued", [None, "run-ffffffff"], ids=["not continued", "continued elsewhere"])
def test_a_fork_that_was_never_finished_goes(stage: str, continued: str | None) -> None:
    # rules N6, L6
    stream = fill(MemoryStore())
    note, beside = begin(stream, stage=stage)
    if continued is not None:
        end(stream, continued)
    num_bytes = sum(map(len, raw(beside).values()))
    before = raw(stream.store), raw(beside)
    said = collect_garbage(stream, dry_run=True)
    assert (said.forks, said.failures) == ((ROOT,), ())
    assert (raw(stream.store), raw(beside)) == before
    done = collect_garbage(stream)
    assert (done.forks, done.failures) == ((ROOT,), ())
    assert done.freed_bytes == said.freed_bytes >= num_bytes + len(note.to_bytes())
    assert raw(beside) == {}
    assert note.key not in raw(stream.store)
    assert collect_garbage(stream).forks == ()
    assert stream.head() == 12


def test_it_is_deleted_so_that_nobody_can_open_half_of_it() -> None:
    # rule L6: stream.json, manifest, files, schema, and last the note that tells of them
    stream = fill(MemoryStore())
    note, beside = begin(stream, stage="stream")
    gone: list[str] = []
    real_delete = MemoryStore.delete
    try:
        MemoryStore.delete = lambda store, key: (gone.append(key), real_delete(store, key))[1]
        collect_garbage(stream)
    finally:
        MemoryStore.delete = real_delete
    assert [key for key in gone if key in {note.key, *_beginning()}] == [*_beginning(), note.key]
    assert raw(beside) == {}


def _beginning() -> list[str]:
    return ["stream.json", MANIFEST, FILE, f"schema/{SCHEMA.id}.json"]


@pytest.mark.parametrize("young", ["note", FILE, MANIFEST, "stream.json"])
def test_a_fork_that_is_being_made_stays(young: str) -> None:
    # rule L6
    stream = fill(MemoryStore())
    note, beside = begin(stream, stage="stream")
    if young == "note":
        age(stream.store, note.key, -2 * HOUR_S)
    else:
        age(beside, young, -2 * HOUR_S)
    before = raw(beside)
    report = collect_garbage(stream)
    assert (report.forks, raw(beside)) == ((), before)
    assert note.key in raw(stream.store), "its writer may still be killed"


def test_a_fork_that_was_finished_stays_and_its_note_goes() -> None:
    # rule L6
    stream = fill(MemoryStore())
    note, beside = begin(stream, stage="stream")
    end(stream, ROOT)
    before = raw(beside)
    for _ in range(2):
        assert collect_garbage(stream, RetentionConfig(grace_s=0.0)).forks == ()
        assert raw(beside) == before
        assert note.key not in raw(stream.store)
    young = note_fork(stream, ROOT, OTHER_ID)
    assert collect_garbage(stream).forks == ()
    assert young.key not in raw(stream.store), "a finished fork needs no note, however young"


@pytest.mark.parametrize(
    "more",
    [
        "head.json",
        "successor.json",
        f"commits/{1:020d}.json",
        f"leases/{NONCE}.json",
        f"anchors/{1:020d}-{NONCE}/model.safetensors",
        f"schema/{'a' * 64}.json",
        "notes.txt",
        f"below/{FILE}",
    ],
)
def test_what_somebody_took_into_use_stays(more: str) -> None:
    # rule L6
    stream = fill(MemoryStore())
    note, beside = begin(stream, stage="stream")
    beside.put_new(more, b"of somebody")
    age(beside, more, 2 * DAY_S)
    before = raw(beside)
    assert collect_garbage(stream).forks == ()
    assert raw(beside) == before
    assert note.key not in raw(stream.store)


@pytest.mark.parametrize("stream_json", ["another stream", "damaged"])
def test_another_stream_at_the_same_root_stays(stream_json: str) -> None:
    # rule L6
    stream = fill(MemoryStore())
    _, beside = begin(stream, stage="schema")
    if stream_json == "another stream":
        Stream(beside).create(make_info("a" * 32), SCHEMA)
    else:
        beside.put_new("stream.json", b"{}\n")
    age(beside, "stream.json", 2 * DAY_S)
    before = raw(beside)
    assert collect_garbage(stream).forks == ()
    assert raw(beside) == before


def test_notes_that_are_none_go_after_the_grace_period() -> None:
    # rules J1, I2
    stream = fill(MemoryStore())
    foreign = ForkNote(nonce="1" * 16, stream_id="a" * 32, root=ROOT, successor_id=OTHER_ID)
    outside = seal(
        {
            "format_version": [1, 0],
            "info": {},
            "root": "../x",
            "stream_id": STREAM_ID,
            "successor_id": OTHER_ID,
        }
    )
    stored = {foreign.key: foreign.to_bytes(), f"forks/{2:016x}.json": b"{}\n", f"forks/{3:016x}.json": outside}
    for key, data in stored.items():
        stream.store.put_new(key, data)
    beside = stream.store.sibling(ROOT)
    beside.put_new(FILE, b"w")
    age(beside, FILE, 2 * DAY_S)
    assert collect_garbage(stream).forks == ()
    assert set(stored) <= set(raw(stream.store))
    for key in stored:
        age(stream.store, key, DAY_S + HOUR_S)
    assert collect_garbage(stream).forks == ()
    assert not set(stored) & set(raw(stream.store))
    assert raw(beside) == {FILE: b"w"}


class _Beside(FaultyStore):
    """A store whose siblings fail as told."""

    def __init__(self, inner: MemoryStore, fault: Fault) -> None:
        super().__init__(inner, [])
        self.fault = fault
        self.opened: list[FaultyStore] = []

    def sibling(self, root: str) -> FaultyStore:
        self.opened.append(FaultyStore(self.inner.sibling(root), [self.fault]))
        return self.opened[-1]


@pytest.mark.parametrize("fault", [Fault("list", "", effect=fail_before()), Fault("get", "*", effect=fail_before())])
def test_without_a_clear_answer_nothing_goes(fault: Fault) -> None:
    # F78
    inner = MemoryStore()
    note, beside = begin(fill(inner), stage="stream")
    before = raw(beside)
    store = _Beside(inner, fault)
    report = collect_garbage(Stream(store))
    store.opened[0].assert_fired()
    assert (report.forks, len(report.failures)) == ((), 1)
    assert raw(beside) == before
    assert note.key in raw(inner)
    assert collect_garbage(Stream(inner)).forks == (ROOT,)


def test_a_delete_that_fails_leaves_the_note() -> None:
    # F88
    inner = MemoryStore()
    note, beside = begin(fill(inner), stage="stream")
    store = _Beside(inner, Fault("delete", FILE, effect=fail_before()))
    report = collect_garbage(Stream(store))
    store.opened[0].assert_fired()
    assert (report.forks, len(report.failures)) == ((), 1)
    assert set(raw(beside)) == {FILE, f"schema/{SCHEMA.id}.json"}
    assert note.key in raw(inner)
    assert collect_garbage(Stream(inner)).forks == (ROOT,)
    assert raw(beside) == {}


@pytest.mark.parametrize("gone", [MANIFEST, "stream.json"])
def test_a_writer_that_was_taken_for_dead_stops(gone: str) -> None:
    # rule N6
    stream = fill(MemoryStore())
    _, beside = begin(stream, stage="stream")
    refuse_if_swept(beside, NONCE)
    beside.delete(gone)
    with pytest.raises(StoreError, match="longer than the grace period") as caught:
        refuse_if_swept(beside, NONCE)
    assert caught.value.facts["key"] == gone


def test_a_note_that_cannot_be_written_is_an_error() -> None:
    # rule N6
    inner = MemoryStore()
    fill(inner)
    store = FaultyStore(inner, [Fault("put_new", "forks/*", effect=fail_before())])
    with pytest.raises(StoreUnavailable):
        note_fork(Stream(store), ROOT, OTHER_ID)
    store.assert_fired()
