"""Backoff, retry and poll: bounded, stoppable, and their errors name phase and peer."""

from __future__ import annotations

import itertools
import threading

import pytest

from torch_delta.errors import DeadlineExceeded, ObjectExists, StoreUnavailable
from torch_delta.store import Backoff, poll, retry

NO_WAIT = Backoff(first_s=1e-6, most_s=1e-6)


class RecordingStop(threading.Event):
    """An event whose waits return at once and are written down; set after `num_waits` of them."""

    def __init__(self, num_waits: int | None = None) -> None:
        super().__init__()
        self.waits_s: list[float] = []
        self.num_waits = num_waits

    def wait(self, timeout=None):
        self.waits_s.append(timeout)
        if self.num_waits is not None and len(self.waits_s) >= self.num_waits:
            self.set()
        return self.is_set()


def failing_times(num: int, error: Exception):
    calls = []

    def attempt() -> str:
        calls.append(1)
        if len(calls) <= num:
            raise error
        return f"after {len(calls)}"

    return attempt


def test_waits_grow_to_their_bound_and_are_jittered_downwards() -> None:
    backoff = Backoff(first_s=1.0, most_s=5.0, factor=2.0, jitter=0.5)
    assert [*itertools.islice(backoff.waits_s(lambda: 0.0), 5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [*itertools.islice(backoff.waits_s(lambda: 1.0), 5)] == [0.5, 1.0, 2.0, 2.5, 2.5]


@pytest.mark.parametrize(
    "bad", [{"first_s": 0.0}, {"first_s": 9.0}, {"factor": 0.5}, {"jitter": 1.5}, {"jitter": -0.1}]
)
def test_a_backoff_that_makes_no_sense_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="expected"):
        Backoff(**bad)


def test_retry_repeats_what_is_transient_and_nothing_else() -> None:
    stop = RecordingStop()
    assert retry(failing_times(3, StoreUnavailable("down")), phase="p", peer="q", timeout_s=60, stop=stop) == "after 4"
    assert len(stop.waits_s) == 3
    attempt = failing_times(1, ObjectExists("taken"))
    with pytest.raises(ObjectExists):
        retry(attempt, phase="p", peer="q", timeout_s=60)


def test_retry_ends_at_its_deadline_and_says_for_whom_it_waited() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"write commit 7: no success within 0 s at file:///x; .* down"
    ) as caught:
        retry(
            failing_times(99, StoreUnavailable("down")),
            phase="write commit 7",
            peer="file:///x",
            timeout_s=0.0,
            backoff=NO_WAIT,
        )  # F32
    facts = caught.value.facts
    assert (facts["phase"], facts["peer"], facts["timeout_s"]) == ("write commit 7", "file:///x", 0.0)
    assert isinstance(caught.value.__cause__, StoreUnavailable)


def test_retry_stops_when_told() -> None:
    attempt = failing_times(99, StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        retry(attempt, phase="p", peer="q", timeout_s=60, stop=RecordingStop(num_waits=2))


def test_poll_waits_for_an_answer_through_errors() -> None:
    answers = iter([None, StoreUnavailable("down"), None, 0])  # 0 is an answer

    def probe():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    stop = RecordingStop()
    assert poll(probe, phase="version 3", peer="q", timeout_s=None, stop=stop) == 0  # F96
    assert len(stop.waits_s) == 3


def test_poll_ends_at_its_deadline_with_the_last_trouble() -> None:
    with pytest.raises(DeadlineExceeded, match=r"version 3: .*it did not happen"):
        poll(lambda: None, phase="version 3", peer="q", timeout_s=0.0)

    def broken():
        raise StoreUnavailable("cannot ask")

    with pytest.raises(DeadlineExceeded, match="cannot ask") as caught:
        poll(broken, phase="version 3", peer="q", timeout_s=0.0)
    assert isinstance(caught.value.__cause__, StoreUnavailable)


def test_poll_returns_none_when_stopped() -> None:
    assert poll(lambda: None, phase="p", peer="q", timeout_s=None, stop=RecordingStop(num_waits=3)) is None


def test_a_stop_from_another_thread_ends_a_long_wait() -> None:
    stop, asked = threading.Event(), threading.Event()

    def probe():
        asked.set()

    slow = Backoff(first_s=600.0, most_s=600.0, jitter=0.0)
    waiter = threading.Thread(
        target=poll, args=(probe,), kwargs={"phase": "p", "peer": "q", "timeout_s": None, "stop": stop, "backoff": slow}
    )
    waiter.start()
    assert asked.wait(60)
    stop.set()
    waiter.join(60)
    assert not waiter.is_alive()
