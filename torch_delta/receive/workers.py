"""Running one function over many items on a pool, so that nothing runs on after it ended."""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, wait
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")
R = TypeVar("R")


def run_all(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results in the order of `items`. At the first error the rest is cancelled and what runs is waited for.

    Unlike `pool.map`, which returns while other calls still run: here callers close files and release locks afterwards.
    """
    futures = [pool.submit(function, item) for item in items]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
