"""The vLLM demo's verdicts and its client, without vLLM; the whole of it runs in tests/vllm/test_demo.py."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from pathlib import Path

import pytest

from examples.demo.sides import DemoFailed
from examples.demo_vllm import __main__ as demo
from examples.demo_vllm.client import Client
from examples.demo_vllm.table import Table

OUT = Path("unused")


def reports(rewards: list[float]) -> list[dict]:
    return [{"version": version, "reward": reward} for version, reward in enumerate(rewards)]


def good(version: int) -> dict:
    return {"ok": True, "version": version}


def test_reports_of_every_version_a_rising_reward_and_a_full_digest_pass() -> None:
    demo.check_reports(reports([0.2, 0.4]), good(1), 1)


@pytest.mark.parametrize(
    ("said", "verified", "match"),
    [
        (reports([0.2]), good(1), r"versions \[0\] instead of 0 to 1"),
        (reports([0.2, 0.2]), good(1), "did not learn: reward 0.200 before, 0.200 after"),
        (reports([0.2, 0.4]), {}, "digest of its live weights at version 1"),
        (reports([0.2, 0.4]), good(0), "digest of its live weights at version 1"),
        (reports([0.2, 0.4]), {"ok": False, "version": 1, "wrong": ["w"]}, "'wrong': .'w'."),
    ],
)
def test_anything_else_fails(said: list[dict], verified: dict, match: str) -> None:
    with pytest.raises(DemoFailed, match=match):
        demo.check_reports(said, verified, 1)


def fresh(monkeypatch: pytest.MonkeyPatch, outputs: list[list[list[int]]]) -> None:
    """Let the fresh servers say this, by version."""

    def run(name: str, *_: str):
        events = [{"version": v, "greedy": said} for v, said in enumerate(outputs)] if name == "fresh vLLM" else []
        yield from events

    monkeypatch.setattr(demo, "run", run)


def test_a_served_policy_that_is_not_the_published_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch, [[[1, 2]], [[3, 4]], [[5, 6]]])
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        demo.compare(OUT, {0: [[1, 2]], 1: [[3, 4]], 2: [[5, 6]]}, 2)
        with pytest.raises(DemoFailed, match=r"not the published one at versions \[1\]"):
            demo.compare(OUT, {0: [[1, 2]], 1: [[3, 5]], 2: [[5, 6]]}, 2)
    assert shown.getvalue().count("equal") == 5
    assert shown.getvalue().count("DIFFERENT") == 1


def test_a_version_that_was_not_compared_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch, [[[1, 2]]])
    with pytest.raises(DemoFailed, match=r"only 1 of 2 versions were compared"):
        demo.compare(OUT, {0: [[1, 2]], 1: [[3, 4]]}, 1)


class FakePolicy:
    """Streams as many tokens as asked, or fewer, or fails; `gate` holds every stream after its first token."""

    def __init__(self, *, short: bool = False, fails: bool = False) -> None:
        self.short, self.fails = short, fails
        self.gate = threading.Event()
        self.started = threading.Event()

    def stream(self, prompt: list[int], num_tokens: int):
        assert prompt
        yield [1]
        self.started.set()
        assert self.gate.wait(30)
        if self.fails:
            raise OSError("the connection was reset")
        yield [2] * (num_tokens - 1 - self.short)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_client_counts_tokens_and_whole_streams() -> None:
    policy = FakePolicy()
    with Client(policy) as client:
        assert policy.started.wait(30)
        begun = time.monotonic()
        assert client.num_between(0.0, begun) == 1
        policy.gate.set()
        wait_for(lambda: client.num_streams >= 2)
        client.check()
        assert client.num_tokens >= 512
        assert client.num_between(begun, time.monotonic()) == client.num_tokens - 1 or client.num_tokens > 512


@pytest.mark.parametrize(("fault", "match"), [("short", "ended after 255 of 256 tokens"), ("fails", "was reset")])
def test_a_stream_that_breaks_fails_the_demo(fault: str, match: str) -> None:
    policy = FakePolicy(**{fault: True})
    policy.gate.set()
    with Client(policy) as client:
        client._thread.join(30)
        with pytest.raises(DemoFailed, match=match):
            client.check()


def test_the_table_has_a_line_per_version() -> None:
    policy = FakePolicy()
    policy.gate.set()
    shown = io.StringIO()
    published = {"num_changed": 10, "num_elements": 1000, "stored_bytes": 20, "full_bytes": 2000}
    with contextlib.redirect_stdout(shown), Client(policy) as client:
        table = Table()
        table.add({"version": 0, "reward": 0.25}, client)
        table.add(
            {
                "version": 1,
                "reward": 0.5,
                "published": published,
                "preparing": (1.0, 1.5),
                "pause_s": 0.0625,
                "updated": 2,
            },
            client,
        )
    rows = [line.split() for line in shown.getvalue().splitlines()[1:]]
    assert rows[0] == ["0", "0.250", "-", "-", "-", "-", "-", "-", "-"]
    assert rows[1][:8] == ["1", "0.500", "1.0%", "20", "100.0", "0.500", "0", "0.062"]
