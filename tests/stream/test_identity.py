"""Creating and loading a stream, and everything that is not this stream."""

from __future__ import annotations

import hashlib

import pytest

from tests.stream.samples import (
    OTHER_ID,
    SCHEMA,
    STREAM_ID,
    commit_key,
    fields_of,
    make_commit,
    make_info,
    raw,
    raw_delete,
    raw_put,
    seal,
    write_chain,
)
from torch_delta.errors import Fenced, FormatError, ObjectNotFound, StoreUnavailable, UnsupportedFormat
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.store import MemoryStore
from torch_delta.stream import Stream
from torch_delta.testing import Fault, FaultyStore
from torch_delta.testing.faults import fail_after, fail_before

SCHEMA_KEY = f"schema/{SCHEMA.id}.json"


def test_what_is_created_is_loaded(store) -> None:
    Stream(store).create(make_info(), SCHEMA)
    assert sorted(raw(store)) == [SCHEMA_KEY, "stream.json"]
    reader = Stream(store)
    assert reader.load() == (make_info(), SCHEMA)
    assert reader.info_sha256 == hashlib.sha256(raw(store)["stream.json"]).hexdigest()
    assert reader.head() == 0
    assert reader.available() is None
    assert reader.successor() is None


def test_an_empty_place_holds_no_stream(store) -> None:
    for ask in (Stream(store).load, Stream(store).head, lambda: Stream(store).commit(1)):
        with pytest.raises(ObjectNotFound, match="there is no stream here"):
            ask()


def test_loading_asks_once(store, writer) -> None:
    counting = FaultyStore(store)
    reader = Stream(counting)
    for _ in range(3):
        reader.load()
    assert counting.calls == {"get": 2}


def test_the_schema_is_written_before_the_stream(store) -> None:  # rule W6
    faulty = FaultyStore(store, [Fault("put_new", "schema/*", effect=fail_before())])
    with pytest.raises(StoreUnavailable):
        Stream(faulty).create(make_info(), SCHEMA)
    assert raw(store) == {}


def test_creating_can_be_repeated_after_a_lost_reply(store) -> None:  # rule K4
    lost = [Fault("put_new", key, effect=fail_after()) for key in ("schema/*", "stream.json")]
    faulty = FaultyStore(store, [*lost, Fault("stat", "stream.json", effect=fail_before())])
    with pytest.raises(StoreUnavailable):
        Stream(faulty).create(make_info(), SCHEMA)
    Stream(faulty).create(make_info(), SCHEMA)
    faulty.assert_fired()
    assert Stream(store).load() == (make_info(), SCHEMA)


def test_another_stream_in_the_same_place_is_left_alone(store, writer) -> None:
    before = raw(store)
    with pytest.raises(Fenced, match=rf"holds stream {STREAM_ID}, not the new stream {OTHER_ID}") as caught:
        Stream(store).create(make_info(OTHER_ID), SCHEMA)
    assert caught.value.facts["owner"] == STREAM_ID
    assert raw(store) == before


def test_a_place_with_somebody_elses_stream_json(store) -> None:
    raw_put(store, "stream.json", b"not ours")
    with pytest.raises(Fenced, match="cannot be read"):
        Stream(store).create(make_info(), SCHEMA)
    with pytest.raises(FormatError):
        Stream(store).load()


def test_a_schema_other_than_the_one_named_is_refused_before_anything_is_written(store) -> None:
    other = Schema((TensorSpec("a", "BF16", (2, 2)), TensorSpec("b", "F32", (4,))))
    with pytest.raises(FormatError) as caught:
        Stream(store).create(make_info(), other)
    assert caught.value.facts["rule"] == "S1"
    assert raw(store) == {}


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_or_deleted_schema(store, writer, damage) -> None:  # rule S1
    stored = raw(store)[SCHEMA_KEY]
    if damage == "delete":
        raw_delete(store, SCHEMA_KEY)
    else:
        raw_put(store, SCHEMA_KEY, stored.replace(b'"a"', b'"x"') if damage == "flip" else stored[:-1])
    # Never ObjectNotFound: a writer would take that for an empty place and start another stream.
    with pytest.raises(FormatError) as caught:
        Stream(store).load()
    assert caught.value.facts["rule"] == "S1"
    if damage != "delete":
        with pytest.raises(FormatError, match="damaged"):
            Stream(store).create(make_info(), SCHEMA)


def test_a_stream_from_the_future(store, writer) -> None:  # rule R1
    fields = fields_of(raw(store)["stream.json"])
    raw_put(store, "stream.json", seal({**fields, "format_version": [2, 0]}))
    with pytest.raises(UnsupportedFormat, match=r"2\.0"):
        Stream(store).load()
    raw_put(store, "stream.json", seal({**fields, "required_features": ["teleport"]}))
    with pytest.raises(UnsupportedFormat, match="teleport"):
        Stream(store).load()
    raw_put(store, "stream.json", seal({**fields, "format_version": [1, 9], "novelty": "ignored"}))
    assert Stream(store).load()[0].stream_id == STREAM_ID


def test_a_version_from_the_future(store, writer) -> None:  # rule R1
    write_chain(writer, 1, 1)
    fields = fields_of(raw(store)[commit_key(1)])
    for change in ({"format_version": [2, 0]}, {"required_features": ["teleport"]}):
        raw_put(store, commit_key(1), seal({**fields, **change}))
        with pytest.raises(UnsupportedFormat) as caught:
            Stream(store).commit(1)
        assert caught.value.facts["key"] == commit_key(1)
        assert caught.value.action == "stop"


def test_a_commit_of_a_foreign_stream_in_the_same_directory(store, writer) -> None:  # rule I2
    elsewhere = MemoryStore()
    other = Stream(elsewhere)
    other.create(make_info(OTHER_ID), SCHEMA)
    other.write_commit(make_commit(1, other.info_sha256, stream_id=OTHER_ID))
    raw_put(store, commit_key(1), raw(elsewhere)[commit_key(1)])
    with pytest.raises(FormatError, match="two streams") as caught:
        Stream(store).commit(1)
    facts = caught.value.facts
    assert (facts["rule"], facts["key"], facts["expected"], facts["got"]) == ("I2", commit_key(1), STREAM_ID, OTHER_ID)


def test_a_writer_cannot_mix_streams_or_schemas(store, writer) -> None:
    before = raw(store)
    for change, rule in (({"stream_id": OTHER_ID}, "I2"), ({"schema_id": "0" * 64}, "S1")):
        with pytest.raises(FormatError) as caught:
            writer.write_commit(make_commit(1, writer.info_sha256, **change))
        assert caught.value.facts["rule"] == rule
    assert raw(store) == before


def test_an_object_above_its_bound_is_refused_unread(store, writer) -> None:  # rule J5
    raw_put(store, "successor.json", bytes(65537))
    with pytest.raises(FormatError) as caught:
        writer.successor()
    facts = caught.value.facts
    assert (facts["rule"], facts["key"], facts["expected"], facts["got"]) == ("J5", "successor.json", 65536, 65537)
