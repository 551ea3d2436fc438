"""What a server's own process does with a version: order of the calls, and every way the pause can go wrong."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from torch_delta.errors import RequestRefused
from torch_delta.vllm import endpoints_control, endpoints_workers
from torch_delta.vllm.endpoints import EndpointPlugin
from torch_delta.vllm.endpoints_calls import EngineCalls, why_not
from torch_delta.vllm.endpoints_control import Controller
from torch_delta.vllm.endpoints_follow import AutoApply, wanted
from torch_delta.vllm.endpoints_requests import (
    MAX_BODY_BYTES,
    Problem,
    Tokens,
    fields,
    is_seconds,
    is_version,
    read_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable

IN_PAUSE = ["pause", "start", "update", "check", "finish", "reset"]


class FakeCalls:
    """An engine's state machine with scripted faults: `faults[call]` is raised once; "hang" never answers."""

    def __init__(self, *, num_workers: int = 1, prepared: int = 0, initialised: bool = True) -> None:
        self.num_workers = num_workers
        self.version = 0
        self.prepared = prepared
        self.initialised = initialised
        self.preparing: list[int | None] = []  # statuses that still say "preparing"
        self.next_prepared = 0
        self.asked = self.answered = 0
        self.stream_id = "a" * 32
        self.error: dict | None = None
        self.paused = self.session = False
        self.cached_version = 0
        self.label: str | None = None
        self.faults: dict[str, list[Any]] = {}
        self.log: list[str] = []
        self.refuse_resets = 0

    async def _do(self, name: str) -> None:
        self.log.append(name)
        if self.faults.get(name):
            fault = self.faults[name].pop(0)
            if fault == "hang":
                await asyncio.Event().wait()
            raise fault

    async def workers(self, method: str, argument: Any = None) -> list[Any]:
        await self._do("check" if self.session else method)
        if method == "torch_delta_prepare":
            if not self.initialised:
                return [{"accepted": False, "error": {"type": "RequestRefused", "message": "init first"}}]
            self.next_prepared = argument["version"] if argument["version"] is not None else 9
            self.asked += 1
            return [{"accepted": True, "target": argument["version"], "request": self.asked}] * self.num_workers
        if method == "torch_delta_verify":
            return [{"accepted": True}] * self.num_workers
        busy = {"phase": "fetch", "target": self.preparing.pop(0)} if self.preparing else None
        if busy is None:
            self.answered = self.asked
        if busy is None and self.error is None:
            self.prepared = max(self.prepared, self.next_prepared)
        return [
            {
                "rank": rank,
                "initialised": self.initialised,
                "version": self.version,
                "prepared": self.prepared,
                "preparing": busy,
                "stream_id": self.stream_id,
                "answered": self.answered,
                "error": self.error,
                "session": self.session,
                "ready": True,
            }
            for rank in range(self.num_workers)
        ]

    async def init(self, init_info: Any) -> None:
        await self._do("init")
        self.initialised = True

    async def is_paused(self) -> bool:
        return self.paused

    async def pause(self) -> None:
        self.paused = True
        await self._do("pause")

    async def resume(self) -> None:
        await self._do("resume")
        self.paused = False

    async def start(self) -> None:
        assert self.paused, "weights change only inside a pause (F108)"
        assert not self.session
        self.session = True
        await self._do("start")

    async def update(self, update_info: Any) -> None:
        assert self.session
        await self._do("update")
        self.version = update_info["version"]

    async def finish(self, label: str | None) -> None:
        assert self.session
        await self._do("finish")
        self.session, self.label = False, label

    async def reset_caches(self) -> bool:
        await self._do("reset")
        if self.refuse_resets:
            self.refuse_resets -= 1
            return False
        self.cached_version = self.version
        return True


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():  # noqa: ASYNC110 - what is awaited has no event to wait for
            await asyncio.sleep(0.001)


def test_a_version_is_applied_in_this_order() -> None:
    calls = FakeCalls(num_workers=2, prepared=3)
    answer = asyncio.run(Controller(calls).update(3))
    assert calls.log == ["torch_delta_status", *IN_PAUSE, "resume"]
    assert (answer["version"], calls.label, calls.paused, calls.session) == (3, "3", False, False)
    assert list(answer["phases_s"]) == [*IN_PAUSE, "resume"]
    assert 0 < sum(answer["phases_s"].values()) <= answer["pause_s"]


@pytest.mark.parametrize("call", [*IN_PAUSE])
@pytest.mark.parametrize("fault", [RuntimeError("Call to update_weights method failed: tensor w differs"), "hang"])
def test_whatever_fails_in_the_pause_ends_resumed_and_without_a_session(call: str, fault: Any) -> None:
    async def scenario() -> None:
        calls = FakeCalls(prepared=2)
        calls.faults = {call: [fault]}
        controller = Controller(calls)
        with pytest.raises(Problem) as caught:
            await controller.update(1, timeout_s=0.2)
        problem = caught.value
        assert (problem.phase, calls.faults[call]) == (call, [])
        if fault == "hang":
            assert (problem.status, problem.kind) == (504, "DeadlineExceeded")
        else:
            assert (problem.status, problem.kind) == (500, "RuntimeError")
            assert problem.message == f"{call}: tensor w differs"
        assert (calls.paused, calls.session) == (False, False)
        assert calls.log[-1] == "resume"
        assert (await controller.status())["ready"] is (call in ("pause", "start"))
        # the next version makes up for it
        assert (await controller.update(2))["version"] == 2
        assert (calls.version, calls.cached_version, calls.label) == (2, 2, "2")
        assert (await controller.status())["ready"] is True

    asyncio.run(scenario())


def test_a_refused_reset_is_not_ready_and_tried_again_at_the_same_version() -> None:  # row F109
    async def scenario() -> None:
        calls = FakeCalls(prepared=1)
        calls.refuse_resets = 1
        controller = Controller(calls)
        with pytest.raises(Problem, match="prefix cache was not reset"):
            await controller.update(1)
        status = await controller.status()
        assert (status["version"], status["ready"], status["owes_reset"], calls.paused) == (1, False, True, False)
        await controller.update(1)
        status = await controller.status()
        assert (calls.cached_version, status["ready"], status["owes_reset"]) == (1, True, False)

    asyncio.run(scenario())


def test_a_failure_gets_the_class_that_the_workers_give_it() -> None:
    """vLLM passes on nothing but the text of what its engine core raises."""

    async def scenario(kind: str) -> Problem:
        calls = FakeCalls(prepared=1)
        calls.faults = {"init": [Exception("Call to collective_rpc method failed: unknown field x")]}
        calls.error = {"type": kind, "message": "unknown field x", "phase": "init"}
        with pytest.raises(Problem) as caught:
            await Controller(calls).init({"x": 1})
        return caught.value

    refused = asyncio.run(scenario("RequestRefused"))
    assert (refused.status, refused.kind, refused.message) == (400, "RequestRefused", "init: unknown field x")
    failed = asyncio.run(scenario("StoreUnavailable"))
    assert (failed.status, failed.kind) == (500, "StoreUnavailable")


def test_resume_is_tried_until_it_works_or_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_control, "_RETRY_S", 0.01)

    async def scenario() -> None:
        calls = FakeCalls(prepared=2)
        calls.faults = {"resume": [RuntimeError("pause in flight")] * 2}
        controller = Controller(calls)
        await controller.update(1)
        assert (calls.log.count("resume"), calls.paused) == (3, False)
        calls.faults = {"resume": ["hang"]}
        with pytest.raises(Problem, match="may still be paused") as caught:
            await controller.update(2, resume_timeout_s=0.1)
        assert caught.value.status == 504
        assert (await controller.status())["ready"] is False
        calls.prepared = 3
        await controller.update(3)  # our own pause, left over: not taken for somebody else's
        assert calls.paused is False

    asyncio.run(scenario())


def test_somebody_elses_pause_is_left_to_them() -> None:
    calls = FakeCalls(prepared=1)
    calls.paused = True
    asyncio.run(Controller(calls).update(1))
    assert (calls.paused, calls.version) == (True, 1)
    assert "pause" not in calls.log
    assert "resume" not in calls.log


def test_an_update_goes_on_when_its_caller_goes_away() -> None:
    async def scenario() -> None:
        calls = FakeCalls(prepared=1)
        gate = asyncio.Event()
        started = asyncio.Event()
        inner = calls.update

        async def slow(update_info: Any) -> None:
            started.set()
            await gate.wait()
            await inner(update_info)

        calls.update = slow
        controller = Controller(calls)
        caller = asyncio.create_task(controller.update(1))
        await started.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert controller.updating
        with pytest.raises(Problem, match="queue") as caught:
            await controller.update(1, timeout_s=0.01)
        assert caught.value.status == 504
        waiting = asyncio.create_task(controller.update(1))
        gate.set()
        assert (await waiting)["pause_s"] == 0.0, "it waits for the other, and finds its work done"
        assert not controller.updating
        assert (calls.version, calls.paused, calls.session) == (1, False, False)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("calls", "version", "match"),
    [
        (FakeCalls(prepared=1), 2, "POST /torch_delta/prepare"),
        (FakeCalls(prepared=1, initialised=False), 1, "POST /torch_delta/init"),
    ],
)
def test_what_cannot_succeed_is_refused_before_the_pause(calls: FakeCalls, version: int, match: str) -> None:
    with pytest.raises(Problem, match=match) as caught:
        asyncio.run(Controller(calls).update(version))
    assert caught.value.status == 409
    assert calls.log == ["torch_delta_status"]


def test_an_older_version_is_refused_and_the_present_one_costs_no_pause() -> None:
    calls = FakeCalls(prepared=5)
    calls.version = 5
    with pytest.raises(Problem, match="older than version 5") as caught:
        asyncio.run(Controller(calls).update(4))
    assert caught.value.status == 409
    assert asyncio.run(Controller(calls).update(5)) == {"version": 5, "pause_s": 0.0, "phases_s": {}}
    assert "pause" not in calls.log


def test_a_server_that_cannot_follow_says_why_and_answers_its_status() -> None:
    async def scenario() -> None:
        controller = Controller(FakeCalls(prepared=1), "start it otherwise")
        for attempt in (controller.update(1), controller.init({}), controller.prepare(1, timeout_s=None, wait=False)):
            with pytest.raises(Problem, match="start it otherwise") as caught:
                await attempt
            assert caught.value.status == 501
        assert (await controller.status())["updates_refused"] == "start it otherwise"

    asyncio.run(scenario())


def test_prepare_waits_until_every_worker_has_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_workers, "_POLL_S", 0.001)
    monkeypatch.setattr(endpoints_workers, "_MARGIN_S", 0.0)

    async def scenario() -> None:
        calls = FakeCalls()
        controller = Controller(calls)
        assert "prepared" not in await controller.prepare(2, timeout_s=None, wait=False)
        calls.preparing = [3, 3, 3]
        assert (await controller.prepare(3, timeout_s=5, wait=True))["prepared"] == 3
        assert calls.preparing == []
        calls.preparing = [None, None]
        assert (await controller.prepare(None, timeout_s=5, wait=True))["prepared"] == 9
        calls.preparing = [10] * 10**6
        with pytest.raises(Problem, match=r"not prepared within 0.05 s .*fetch") as caught:
            await controller.prepare(10, timeout_s=0.05, wait=True)
        assert caught.value.status == 504
        calls.preparing, calls.next_prepared = [], 0
        calls.error = {"type": "StoreUnavailable", "message": "no bucket"}
        with pytest.raises(Problem, match="no bucket") as caught:
            await controller.prepare(11, timeout_s=5, wait=True)
        assert (caught.value.status, caught.value.kind) == (500, "StoreUnavailable")
        calls.initialised = False
        with pytest.raises(Problem, match="init first") as caught:
            await controller.prepare(12, timeout_s=5, wait=True)
        assert caught.value.status == 400

    asyncio.run(scenario())


def test_at_once_means_every_version_the_workers_have() -> None:
    async def scenario() -> None:
        calls = FakeCalls(prepared=2)
        auto = AutoApply(Controller(calls))
        assert await auto.step()
        assert calls.version == 2
        assert not await auto.step()
        calls.prepared = 4
        assert await auto.step()
        assert (calls.version, auto.report()) == (4, {"num_applied": 2, "failure": None})
        calls.prepared, calls.faults = 5, {"update": [RuntimeError("no")]}
        with pytest.raises(Problem):
            await auto.step()
        assert await auto.step()
        assert (calls.version, calls.paused) == (5, False)

    asyncio.run(scenario())


def test_the_loop_keeps_a_failure_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_delta.vllm.endpoints_follow._LOOK_S", 0.001)

    async def scenario() -> None:
        calls = FakeCalls(prepared=1)
        calls.faults = {"update": [RuntimeError("no")]}
        auto = AutoApply(Controller(calls))
        task = asyncio.create_task(auto.run())
        await until(lambda: auto.num_applied == 1 and auto.failure is None)
        assert calls.faults["update"] == []
        assert (calls.version, calls.log.count("pause")) == (1, 2)
        task.cancel()

    asyncio.run(scenario())


def test_at_once_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (wanted({}), wanted({"TORCH_DELTA_AUTO_APPLY": "0"}), wanted({"TORCH_DELTA_AUTO_APPLY": "1"})) == (
        False,
        False,
        True,
    )
    with pytest.raises(RequestRefused, match="expected 0 or 1"):
        wanted({"TORCH_DELTA_AUTO_APPLY": "yes"})
    monkeypatch.setenv("TORCH_DELTA_AUTO_APPLY", "1")
    with pytest.raises(RequestRefused, match="no engine"):
        asyncio.run(EndpointPlugin().init_state(None, None, None))


def test_vllms_client_is_called_with_every_option_named() -> None:  # row F111
    """Its defaults would abort requests, keep running requests' caches, or hand late replies to the next call."""
    made: list[tuple[str, tuple, dict]] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            async def call(*args: Any, **options: Any) -> list[Any]:
                made.append((name, args, options))
                return []

            return call

    async def scenario() -> None:
        calls = EngineCalls(Client())
        await calls.pause()
        await calls.resume()
        await calls.workers("torch_delta_status")
        await calls.workers("torch_delta_prepare", {"version": 3})
        await calls.start()
        await calls.finish("3")
        assert await calls.reset_caches() is False

    asyncio.run(scenario())
    assert made == [
        ("pause_generation", (), {"mode": "keep", "clear_cache": True}),
        ("resume_generation", (), {}),
        ("collective_rpc", ("torch_delta_status",), {"args": ()}),
        ("collective_rpc", ("torch_delta_prepare",), {"args": ({"version": 3},)}),
        ("start_weight_update", (), {}),
        ("finish_weight_update", ("3",), {}),
        ("reset_prefix_cache", (True, True), {}),
    ]


def test_servers_whose_workers_cannot_all_be_asked_are_refused() -> None:  # row F112: replicas that pause one by one
    def client(*, replicas: int = 1, processes: int = 1, backend: str | None = "torch_delta") -> Any:
        parallel = SimpleNamespace(data_parallel_size=replicas, _api_process_count=processes)
        transfer = None if backend is None else SimpleNamespace(backend=backend)
        return SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel, weight_transfer_config=transfer))

    assert why_not(client()) is None
    assert "no engine" in why_not(None)
    assert "--api-server-count 1" in why_not(client(processes=2))
    assert "one server per replica" in why_not(client(replicas=2))
    for backend in (None, "nccl"):
        assert "--weight-transfer-config" in why_not(client(backend=backend))


# -- requests (rows F116, F117)


async def chunks(*parts: bytes):
    for part in parts:
        yield part


def read(body: bytes, content_type: str | None = "application/json") -> Any:
    return asyncio.run(read_json(chunks(body[:3], body[3:]), content_type))


def test_a_body_is_a_small_json_object() -> None:
    assert read(b'{"version": 3}') == {"version": 3}
    assert read(b'{"version": 3}', "application/json; charset=utf-8") == {"version": 3}
    assert read(b"") == {}
    for body, content_type, status in [
        (b"\x80\x04\x95pickle", "application/octet-stream", 415),
        (b"{}", None, 415),
        (b"\x80\x04\x95pickle", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 50_000, "application/json", 400),
        (b" " * (MAX_BODY_BYTES + 1), "application/json", 413),
    ]:
        with pytest.raises(Problem) as caught:
            read(body, content_type)
        assert caught.value.status == status


def test_unknown_missing_and_impossible_fields_are_named() -> None:
    from torch_delta.vllm.endpoints import _PREPARE, _UPDATE

    assert fields({"version": 3}, _UPDATE) == {
        "version": 3,
        "mode": "auto",
        "stream_id": None,
        "timeout_s": 120.0,
        "resume_timeout_s": 60.0,
    }
    assert fields({}, _PREPARE) == {"version": None, "stream_id": None, "timeout_s": None, "wait": False}
    for given, match in [
        ({"version": 3, "force": True}, "unknown field 'force'; known: version, mode"),
        ({}, "version is missing"),
        ({"version": "3"}, "version is '3'; expected a version"),
        ({"version": True}, "version is True"),
        ({"version": -1}, "version is -1"),
        ({"version": 1, "mode": "fast"}, "auto or reload"),
        ({"version": 1, "timeout_s": 0}, "seconds above 0"),
        ({"version": 1, "timeout_s": float("inf")}, "seconds above 0"),
    ]:
        with pytest.raises(Problem, match=match) as caught:
            fields(given, _UPDATE)
        assert caught.value.status == 400
    assert (is_version(0), is_version(2**53), is_seconds(True)) == (True, False, False)


def test_tokens_are_checked_when_there_are_any() -> None:
    Tokens([None, ""]).check(None)
    tokens = Tokens(["one", "two"])
    tokens.check("Bearer one")
    tokens.check("bearer two")
    for header in (None, "", "one", "Basic one", "Bearer", "Bearer three", "Bearer one two"):
        with pytest.raises(Problem) as caught:
            tokens.check(header)
        assert caught.value.status == 401


def test_problems_look_like_vllms_errors() -> None:
    body = Problem(409, "why", phase="update", kind="Busy").body()
    assert body == {"error": {"message": "why", "type": "Busy", "code": 409, "phase": "update"}}
