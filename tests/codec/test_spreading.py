"""Work is handed to threads only in bunches that repay it, and its results come in order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.codec.spreading import WORTH_A_THREAD, spread


@given(costs=st.lists(st.integers(0, 2 * WORTH_A_THREAD), max_size=30))
def test_results_come_in_order_and_cheap_neighbours_share_a_thread(costs: list[int]) -> None:
    threads: dict[int, int] = {}

    def work(item: int) -> int:
        threads[item] = threading.get_ident()
        return 2 * item

    items = list(range(len(costs)))
    with ThreadPoolExecutor(4) as pool:
        assert list(spread(pool, work, items, costs)) == [2 * item for item in items]
    if sum(costs) < WORTH_A_THREAD:
        assert set(threads.values()) <= {threading.get_ident()}
    bunch: list[int] = []
    for item, cost in zip(items, costs, strict=True):
        bunch.append(item)
        if sum(costs[other] for other in bunch) >= WORTH_A_THREAD or (cost == costs[-1] and item == items[-1]):
            assert len({threads[other] for other in bunch}) == 1
            bunch = []


def test_two_expensive_items_run_at_once() -> None:
    both = threading.Barrier(2, timeout=30)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(spread(pool, lambda _: both.wait(), "ab", [WORTH_A_THREAD] * 2)) == [0, 1]


@pytest.mark.parametrize("cost", [0, WORTH_A_THREAD])
def test_an_exception_comes_where_its_result_is_due(cost: int) -> None:
    def work(item: int) -> int:
        if item == 1:
            raise ValueError("one")
        return item

    with ThreadPoolExecutor(2) as pool:
        results = spread(pool, work, range(3), [cost] * 3)
        assert next(results) == 0
        with pytest.raises(ValueError, match="one"):
            next(results)


def test_without_a_pool_everything_stays_here() -> None:
    here = list(spread(None, lambda _: threading.get_ident(), range(3), [WORTH_A_THREAD] * 3))
    assert here == [threading.get_ident()] * 3
