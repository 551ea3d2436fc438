"""A failed parallel step leaves nothing running behind it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_delta.receive.workers import run_all


def test_results_come_in_order() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert run_all(pool, lambda item: item * item, range(50)) == [item * item for item in range(50)]
        assert run_all(pool, str, []) == []


def test_an_error_waits_for_what_runs_and_cancels_the_rest() -> None:
    # A file closed under a running thread could be another file by the time that thread writes.
    running, failed = threading.Event(), threading.Event()
    finished: list[int] = []

    def work(item: int) -> None:
        if item == 1:
            assert running.wait(30)
            threading.Timer(0.05, failed.set).start()
            raise KeyError(item)
        running.set()
        assert failed.wait(30)
        finished.append(item)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(KeyError):
            run_all(pool, work, range(100))
        assert 0 in finished, "item 0 was still running"
        assert len(finished) < 99
