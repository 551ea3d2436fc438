"""Conformance tests of a store: creating once, hints, deleting; alone and in races."""
# ruff: noqa: D102 - the name of a test says what it demands

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import FormatError, ObjectExists, ObjectNotFound
from torch_delta.store.base import BytesLike, Created, ObjectInfo, Store
from torch_delta.testing.faults import Fault, FaultyStore, fail_after
from torch_delta.testing.store_hooks import COMMIT, PART, VERSION, StoreHooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class WritingTests(StoreHooks):
    """What `put_new`, `create_or_same`, `put_hint` and `delete` promise."""

    # Creating

    def test_creates_once(self, store: Store) -> None:
        info = store.put_new(COMMIT, b"first")
        assert (info.key, info.size_bytes) == (COMMIT, 5)
        assert self.raw_get(store, COMMIT) == b"first"
        for again in (b"second", b"first"):
            with pytest.raises(ObjectExists) as caught:
                store.put_new(COMMIT, again)
            assert caught.value.facts["key"] == COMMIT
        assert self.raw_get(store, COMMIT) == b"first"

    def test_respects_what_was_put_past_it(self, store: Store) -> None:
        self.raw_put(store, COMMIT, b"first")
        with pytest.raises(ObjectExists):
            store.put_new(COMMIT, b"second")
        assert self.raw_get(store, COMMIT) == b"first"

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        empty: list[bytes] = []
        store.put_new(COMMIT, b"")
        assert store.put_new(PART, empty).size_bytes == 0
        for key in (COMMIT, PART):
            assert self.raw_get(store, key) == b""
            assert store.get(key) == b""
            assert store.stat(key).size_bytes == 0
            with pytest.raises(ObjectExists):
                store.put_new(key, b"x")

    def test_pieces_of_any_buffer_are_written_in_order(self, store: Store) -> None:
        words = memoryview(bytearray(b"cdef")).cast("H")
        pieces: list[BytesLike] = [b"a", bytearray(b"b"), memoryview(b""), words, memoryview(b"")[:0], b"g"]
        assert store.put_new(PART, iter(pieces)).size_bytes == 7
        assert self.raw_get(store, PART) == b"abcdefg"

    def test_a_buffer_may_be_reused_as_soon_as_the_call_returned(self, store: Store) -> None:
        buffer = bytearray(b"first")  # F25
        store.put_new(COMMIT, buffer)
        store.put_hint("head.json", memoryview(buffer))
        buffer[:] = b"other"
        assert self.raw_get(store, COMMIT) == b"first"
        assert self.raw_get(store, "head.json") == b"first"

    def test_a_big_object_is_streamed(self, store: Store) -> None:
        piece = bytes(range(256)) * 4096  # 1 MiB
        num_pieces = self.big_bytes // len(piece)
        expected = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            for number in range(num_pieces):
                data = number.to_bytes(8, "little") + piece[8:]
                expected.update(data)
                yield data

        assert store.put_new(PART, pieces()).size_bytes == num_pieces * len(piece)
        stored = self.raw_get(store, PART)
        assert stored is not None
        assert hashlib.sha256(stored).digest() == expected.digest()
        begin = (num_pieces - 1) * len(piece)
        assert store.get_range(PART, begin, 8) == (num_pieces - 1).to_bytes(8, "little")
        assert store.get(PART) == stored

    @pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt])
    def test_a_put_whose_source_fails_leaves_nothing(self, store: Store, error: type[BaseException]) -> None:
        def pieces() -> Iterator[bytes]:
            yield bytes(1 << 20)
            raise error("from the source")

        with pytest.raises(error, match="from the source"):
            store.put_new(PART, pieces())
        assert self.raw_get(store, PART) is None
        assert [*store.list()] == []
        store.put_new(PART, b"second try")
        assert self.raw_get(store, PART) == b"second try"

    def test_an_object_is_visible_only_when_complete(self, store: Store) -> None:
        written, looked = threading.Event(), threading.Event()

        def pieces() -> Iterator[bytes]:
            yield bytes(1 << 20)
            written.set()
            assert looked.wait(60)
            yield b"end"

        with ThreadPoolExecutor(1) as pool:
            put = pool.submit(store.put_new, PART, pieces())
            assert written.wait(60)
            try:
                with pytest.raises(ObjectNotFound):
                    store.stat(PART)
                assert [*store.list("parts/")] == []
                assert self.raw_get(store, PART) is None
            finally:
                looked.set()
            put.result(60)
        assert store.stat(PART).size_bytes == (1 << 20) + 3

    def test_one_of_many_racers_wins(self, store: Store) -> None:
        for number in range(5):
            key = f"commits/{number:020d}.json"
            contents = [f"racer {racer}".encode() * 100 for racer in range(self.num_racers)]
            outcomes = self.race(partial(_put_own, store, key, contents))
            winners = [racer for racer, outcome in enumerate(outcomes) if isinstance(outcome, ObjectInfo)]
            assert len(winners) == 1, outcomes
            assert all(isinstance(outcome, ObjectInfo | ObjectExists) for outcome in outcomes), outcomes
            assert self.raw_get(store, key) == contents[winners[0]]

    # Creating, or finding one's own

    def test_create_or_same_tells_its_three_outcomes_apart(self, store: Store) -> None:
        assert store.create_or_same(COMMIT, b"ours") is Created.NEW
        assert store.create_or_same(COMMIT, b"ours") is Created.SAME
        assert store.create_or_same(COMMIT, (b"ou", b"rs")) is Created.SAME
        for other in (b"ours?", b"our", b"OURS", b""):
            with pytest.raises(ObjectExists, match="another writer") as caught:
                store.create_or_same(COMMIT, other)
            assert caught.value.facts["key"] == COMMIT
        assert self.raw_get(store, COMMIT) == b"ours"

    def test_a_create_whose_reply_was_lost_is_found_by_reading_back(self, store: Store) -> None:
        faulty = FaultyStore(store, [Fault("put_new", COMMIT, effect=fail_after())])
        assert faulty.create_or_same(COMMIT, b"ours") is Created.SAME
        faulty.assert_fired()
        assert self.raw_get(store, COMMIT) == b"ours"

    def test_of_many_racers_with_equal_bytes_all_succeed(self, store: Store) -> None:
        outcomes = self.race(lambda _: store.create_or_same(COMMIT, b"equal" * 1000))
        assert outcomes.count(Created.NEW) == 1, outcomes
        assert outcomes.count(Created.SAME) == self.num_racers - 1, outcomes

    # Copying inside the store

    def test_a_copy_is_an_object_of_its_own(self, store: Store) -> None:
        source, key = f"anchors/{VERSION}-0123456789abcdef/a", f"anchors/{VERSION}-fedcba9876543210/b"
        content = bytes(range(256)) * 1000
        self.raw_put(store, source, content)
        made = store.copy(source, key)
        if made is None:
            pytest.skip("this store cannot copy")
        assert (made.key, made.size_bytes) == (key, len(content))
        before, after = store.stat(source), store.stat(key)
        if before.modified_s is not None and after.modified_s is not None:
            assert after.modified_s >= before.modified_s  # never taken for old garbage
        assert [info.key for info in store.list("anchors/")] == [source, key]
        store.delete(source)
        assert self.raw_get(store, source) is None
        assert self.raw_get(store, key) == content
        assert store.get(key) == content

    def test_a_copy_of_what_was_put_through_the_store(self, store: Store) -> None:
        source, key = f"anchors/{VERSION}-0123456789abcdef/a", f"anchors/{VERSION}-fedcba9876543210/a"
        store.put_new(source, iter([b"ab", b"cd"]))
        if store.copy(source, key) is None:
            pytest.skip("this store cannot copy")
        assert self.raw_get(store, key) == b"abcd"
        with pytest.raises(ObjectExists):
            store.put_new(key, b"other")

    def test_a_copy_replaces_nothing_and_of_nothing_is_an_error(self, store: Store) -> None:
        taken, other, free = (PART.replace("0123456789abcdef", digit * 16) for digit in "abc")
        self.raw_put(store, PART, b"source")
        self.raw_put(store, taken, b"taken")
        if store.copy(PART, free) is None:
            pytest.skip("this store cannot copy")
        with pytest.raises(ObjectExists):
            store.copy(PART, taken)
        with pytest.raises(ObjectNotFound):
            store.copy(f"parts/{VERSION}/absent", other)
        assert self.raw_get(store, taken) == b"taken"
        assert self.raw_get(store, other) is None

    # Siblings

    def test_a_sibling_lies_beside_it(self, store: Store) -> None:
        with store.sibling("beside-0a1b2c3d") as other:
            other.put_new(COMMIT, b"theirs")
            assert other.url.rpartition("/")[0] == store.url.rpartition("/")[0]
            with pytest.raises(ObjectNotFound):
                store.stat(COMMIT)
            store.put_new(COMMIT, b"ours")
            assert other.get(COMMIT) == b"theirs"
            other.delete(COMMIT)
        for root in ("../x", "/x", "", "a//b"):
            with pytest.raises(FormatError):
                store.sibling(root)

    # Hints

    def test_a_hint_can_be_overwritten(self, store: Store) -> None:
        for data in (b"version 1", b"v2", b"", b"version 3"):
            store.put_hint("head.json", data)
            assert self.raw_get(store, "head.json") == data
            assert store.get("head.json") == data

    def test_a_hint_is_never_seen_torn_or_absent(self, store: Store) -> None:
        contents = [bytes([65 + number]) * (1 + 70_000 * number) for number in range(4)]
        store.put_hint("head.json", contents[0])
        done = threading.Event()

        def read() -> int:
            num_reads = 0
            while not done.is_set() or num_reads == 0:
                assert store.get("head.json") in contents
                num_reads += 1
            return num_reads

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for number in range(40):
                    store.put_hint("head.json", contents[number % 4])
            finally:
                done.set()
            assert all(reader.result(60) > 0 for reader in readers)

    # Deleting

    def test_deleting_is_idempotent_and_frees_the_name(self, store: Store) -> None:
        self.raw_put(store, PART, b"x")
        self.raw_put(store, COMMIT, b"x")
        store.delete(PART)
        assert self.raw_get(store, PART) is None
        assert [info.key for info in store.list()] == [COMMIT]
        store.delete(PART)
        store.delete("never/there")
        with pytest.raises(ObjectNotFound):
            store.get(PART)
        store.put_new(PART, b"again")
        assert self.raw_get(store, PART) == b"again"

    def test_many_deleters_of_one_object_all_succeed(self, store: Store) -> None:
        keys = [f"parts/{VERSION}/{number:05d}.safetensors" for number in range(20)]
        for key in keys:
            self.raw_put(store, key, b"x")
        outcomes = self.race(lambda _: [store.delete(key) for key in keys])  # F88
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
        assert [*store.list()] == []

    def test_creating_beside_a_deletion_never_fails(self, store: Store) -> None:
        done = threading.Event()

        def delete_and_recreate() -> None:
            while not done.is_set():
                store.put_new(f"parts/{VERSION}/deleted", b"x")
                store.delete(f"parts/{VERSION}/deleted")

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(delete_and_recreate)
            try:
                for number in range(50):
                    store.put_new(f"parts/{VERSION}/kept-{number}", b"x")
                    store.delete(f"parts/{VERSION}/kept-{number}")
            finally:
                done.set()
            other.result(60)


def _put_own(store: Store, key: str, contents: Sequence[bytes], racer: int) -> ObjectInfo:
    return store.put_new(key, contents[racer])
