"""Conformance tests of a store: reading, listing, and keys that must be refused."""
# ruff: noqa: D102 - the name of a test says what it demands

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import FormatError, ObjectNotFound
from torch_delta.testing.store_hooks import COMMIT, HOSTILE, PART, StoreHooks

if TYPE_CHECKING:
    from torch_delta.store.base import Store


class ReadingTests(StoreHooks):
    """What `get`, `get_range`, `stat` and `list` promise."""

    # Reading

    def test_reads_what_was_put_past_it(self, store: Store) -> None:
        self.raw_put(store, COMMIT, b"0123456789")
        assert store.get(COMMIT) == b"0123456789"
        assert store.get(COMMIT, max_bytes=10) == b"0123456789"
        assert store.get_range(COMMIT, 0, 10) == b"0123456789"
        assert store.get_range(COMMIT, 3, 4) == b"3456"
        assert store.get_range(COMMIT, 10, 0) == b""
        info = store.stat(COMMIT)
        assert (info.key, info.size_bytes) == (COMMIT, 10)
        path = store.open_local(COMMIT)
        assert path is None or path.read_bytes() == b"0123456789"

    @pytest.mark.parametrize("key", [COMMIT, PART, "stream.json", "commits"])
    def test_an_absent_object_is_not_found(self, store: Store, key: str) -> None:
        self.raw_put(store, "commits/other.json", b"x")  # so that "commits" is at most a folder, which is no object
        for read in (
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.stat(key),
        ):
            with pytest.raises(ObjectNotFound) as caught:
                read()
            assert (caught.value.facts["key"], caught.value.facts["url"]) == (key, store.url)

    def test_a_path_through_an_object_is_not_found(self, store: Store) -> None:
        self.raw_put(store, "head.json", b"x")
        with pytest.raises(ObjectNotFound):
            store.get("head.json/below")

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (10, 1), (11, 0), (5, 6), (1 << 40, 1)])
    def test_a_range_past_the_end_is_an_error_never_a_short_answer(self, store: Store, start: int, length: int) -> None:
        self.raw_put(store, PART, b"0123456789")
        with pytest.raises(FormatError) as caught:
            store.get_range(PART, start, length)
        assert (caught.value.facts["expected"], caught.value.facts["got"]) == (start + length, 10)

    def test_a_negative_range_is_the_callers_mistake(self, store: Store) -> None:
        self.raw_put(store, PART, b"0123456789")
        for start, length in ((-1, 1), (0, -1)):
            with pytest.raises(ValueError, match="negative"):
                store.get_range(PART, start, length)

    def test_an_object_above_the_bound_is_refused(self, store: Store) -> None:
        self.raw_put(store, COMMIT, bytes(1001))
        with pytest.raises(FormatError) as caught:
            store.get(COMMIT, max_bytes=1000)
        assert (caught.value.facts["expected"], caught.value.facts["got"]) == (1000, 1001)

    # Listing

    def test_a_fresh_store_lists_nothing(self, store: Store) -> None:
        assert [*store.list()] == []
        assert [*store.list("commits/")] == []

    def test_lists_in_the_order_of_the_keys_bytes(self, store: Store) -> None:
        # "-" < "." < "/" < "0": a folder walked by its bare name would come out wrong.
        keys = ["a-b", "a-b.json", "a-b/c", "a.json", "a/b", "a/b.json", "a/b/c", "a0", "a_b/c", "b"]
        keys = [key for key in keys if not any(other.startswith(f"{key}/") for other in keys)]
        for key in reversed(keys):
            self.raw_put(store, key, key.encode())
        listed = [*store.list()]
        assert [info.key for info in listed] == sorted(keys, key=str.encode)
        assert [info.size_bytes for info in listed] == [len(key) for key in sorted(keys, key=str.encode)]
        for after in [*keys, "a", "a/", "a/b/", "a-", "", "zzz", "a/zzz"]:
            expected = sorted(key for key in keys if key > after)
            assert [info.key for info in store.list(start_after=after)] == expected, after

    def test_lists_below_a_folder_only(self, store: Store) -> None:
        for key in ("commits/1.json", "commits/2.json", "commits/sub/3.json", "commits-old/4.json", "commits.json"):
            self.raw_put(store, key, b"x")
        expected = ["commits/1.json", "commits/2.json", "commits/sub/3.json"]
        assert [info.key for info in store.list("commits/")] == expected
        assert [info.key for info in store.list("commits/", start_after="commits/1.json")] == expected[1:]
        assert [info.key for info in store.list("commits/sub/")] == expected[2:]
        assert [info.key for info in store.list("absent/")] == []
        for prefix in ("commits", "com", "/", "../"):
            with pytest.raises((ValueError, FormatError)):
                [*store.list(prefix)]

    def test_lists_more_than_one_page(self, store: Store) -> None:
        keys = [f"commits/{number:020d}.json" for number in range(1100)]  # F90: common page sizes are 1000
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(lambda key: self.raw_put(store, key, b"x"), keys)]
        assert [info.key for info in store.list("commits/")] == keys
        assert [info.key for info in store.list("commits/", start_after=keys[1096])] == keys[1097:]

    def test_sees_an_object_as_soon_as_it_is_created(self, store: Store) -> None:
        for number in range(20):
            key = f"commits/{number:020d}.json"
            with pytest.raises(ObjectNotFound):
                store.stat(key)
            store.put_new(key, b"x")
            assert store.stat(key).size_bytes == 1
            assert [info.key for info in store.list("commits/")][-1] == key

    # Everything

    @pytest.mark.parametrize("key", HOSTILE)
    def test_a_hostile_key_is_refused_by_every_method(self, store: Store, key: str) -> None:  # rules K1, K2
        self.raw_put(store, COMMIT, b"x")
        for call in (
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.stat(key),
            lambda: store.open_local(key) or store.stat(key),
            lambda: store.put_new(key, b"hostile"),
            lambda: store.create_or_same(key, b"hostile"),
            lambda: store.put_hint(key, b"hostile"),
            lambda: store.delete(key),
            lambda: store.copy(key, PART) or store.stat(key),
            lambda: store.copy(COMMIT, key) or store.stat(key),
        ):
            with pytest.raises(FormatError):
                call()
        assert [info.key for info in store.list()] == [COMMIT]

    def test_sweeping_leaves_objects_alone(self, store: Store) -> None:
        self.raw_put(store, COMMIT, b"x")
        assert store.sweep_temporary(older_than_s=0.0) == 0
        assert [info.key for info in store.list()] == [COMMIT]

    def test_names_itself_and_closes_twice(self, store: Store) -> None:
        assert "://" in store.url
        assert store.url in repr(store)
        with store:
            pass
        store.close()
