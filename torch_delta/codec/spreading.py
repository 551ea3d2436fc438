"""Spreading a list of work over the threads of a pool, where it is large enough to repay handing it over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

WORTH_A_THREAD: Final = 1 << 18
"""Cost of what is handed over at once: some two milliseconds of encoding changed elements. Two threads that meet at the
interpreter's lock after every few microseconds are slower than one."""


def spread(
    pool: Executor | None, work: Callable[[_Item], _Result], items: Sequence[_Item], costs: Sequence[int]
) -> Iterator[_Result]:
    """`map(work, items)`; neighbours that are cheap share a thread, and what is cheap altogether stays on this one.

    Args:
        pool: not the one this call runs in; None: everything on this thread.
        work: releases the GIL for most of what it takes.
        items: in the order of the results.
        costs: of each item, in changed elements or what takes as long.

    Raises:
        Exception: the first one raised by `work`, where its result is due.
    """
    bunches: list[list[_Item]] = []
    filled = WORTH_A_THREAD
    for item, cost in zip(items, costs, strict=True):
        if filled >= WORTH_A_THREAD:
            bunches.append([])
            filled = 0
        bunches[-1].append(item)
        filled += cost
    if pool is None or len(bunches) < 2:
        return map(work, items)
    return (result for bunch in pool.map(lambda some: [work(item) for item in some], bunches) for result in bunch)
