"""A few threads that share a list of work with the thread that brings it; what they run releases the GIL.

The caller works too and never waits for a helper that has not begun, so work may bring work of its own (a unit that is
cut into pieces) on the same threads without a deadlock.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

MAX_THREADS = 16
"""More do not help: memory is the limit long before."""

WORTH_A_HELPER = 1 << 20
"""Elements to read before work is handed to another thread: some 0.7 ms. Two threads that both run short calls spend
more on passing the interpreter's lock to and fro than they save."""


def num_threads() -> int:
    """Threads to work with, the caller's included: as many as torch may use, which respects how ranks share a host."""
    return max(1, min(torch.get_num_threads(), MAX_THREADS))


def share(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """`[work(item) for item in items]`, begun in order, on this thread and the helpers that are free.

    Gradients are off in `work`. After an exception no further item is begun; those that run are waited for.

    Raises:
        Exception: the first one raised by `work`.
    """
    helpers = min(num_threads(), len(items)) - 1
    if helpers < 1:
        with torch.no_grad():
            return [work(item) for item in items]
    batch = _Batch(work, items)
    pool = _pool(num_threads() - 1)
    running = [pool.submit(batch.run) for _ in range(helpers)]
    batch.run()
    for helper in running:
        if not helper.cancel():
            helper.result()
    if batch.failure is not None:
        raise batch.failure
    return [batch.results[number] for number in range(len(items))]


class _Batch(Generic[_Item, _Result]):
    def __init__(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> None:
        self._work = work
        self._items = items
        self._numbers = iter(range(len(items)))
        self._lock = threading.Lock()
        self.results: dict[int, _Result] = {}
        self.failure: BaseException | None = None

    @torch.no_grad()
    def run(self) -> None:
        """Take items until none is left. Never raises."""
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None or self.failure is not None:
                return
            try:
                self.results[number] = self._work(self._items[number])
            except BaseException as error:
                with self._lock:
                    self.failure = self.failure if self.failure is not None else error


class Aside(Generic[_Item]):
    """Work that helpers do while the caller goes on and brings more; what none has begun in the end, the caller does.

    Used by one thread. Gradients are off in what a helper does.

    Args:
        work: what to do with an item; releases the GIL.
    """

    def __init__(self, work: Callable[[_Item], object]) -> None:
        self._work = work
        self._waiting: deque[_Item] = deque()
        self._num_waiting = 0
        self._running: list[Future[None]] = []
        self._failure: BaseException | None = None

    def add(self, item: _Item, num_elements: int) -> None:
        """Hand over an item.

        Args:
            item: to be worked on.
            num_elements: that its work reads; small items wait until together they are worth a helper.
        """
        self._waiting.append(item)
        self._num_waiting += num_elements
        helpers = num_threads() - 1
        if self._num_waiting < WORTH_A_HELPER or helpers < 1:
            return
        self._running = [future for future in self._running if not future.done()]
        if len(self._running) < helpers:
            self._num_waiting = 0
            self._running.append(_pool(helpers).submit(self._help))

    def finish(self) -> None:
        """Everything is done when this returns.

        Raises:
            Exception: the first one raised by `work`; no item was begun after it.
        """
        self._drain()
        self._wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Begin nothing more, and wait for what runs. Never raises."""
        self._waiting.clear()
        self._wait()

    def _wait(self) -> None:
        for future in self._running:
            if not future.cancel():
                future.result()

    @torch.no_grad()
    def _help(self) -> None:
        self._drain()

    def _drain(self) -> None:
        while self._failure is None:
            try:
                item = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._work(item)
            except BaseException as error:
                self._failure = error


@cache
def _pool(num_helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_helpers, "torch_delta-capture")


# A forked child has the object but not its threads: work it submitted would wait for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)
