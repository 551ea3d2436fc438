"""Real servers (TP=1) that follow one stream in a bucket: our routes, vLLM's own, and the fleet client.

`serving` is told what to do; `following` follows and applies on its own. Both are on one host and share its checkpoint,
and all tests share both, in this order: starting one takes most of a minute.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from tests.lanes import HAS_VLLM
from tests.vllm.folder_bucket import FolderBucket
from tests.vllm.servers import MODEL, Server
from tests.vllm.tiny import Versions
from torch_delta import crashpoints
from torch_delta.errors import FleetFailed
from torch_delta.vllm.fleet import Fleet, FleetConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKEN = "a dummy token"
STREAM = "s3://bucket/run"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LONG = {"max-model-len": 1024, "enable-scale-out": True}
WAIT_S = 120.0
TELLS_WEIGHTS_APART = HAS_VLLM and tuple(map(int, metadata.version("vllm").split(".")[:2])) >= (0, 32)
"""Whether this vLLM says which of a request's tokens were made by which weights."""


class World:
    """What the tests of this module share: the stream, and the servers that follow it."""

    def __init__(self, folder: Path, base: Path, bucket: FolderBucket, versions: Versions) -> None:
        self.folder, self.base, self.bucket, self.versions = folder, base, bucket, versions
        self.written: dict[int, Path] = {}

    def start(self, name: str, **environment: str) -> Server:
        variables = {
            **self.bucket.environment,
            "TORCH_DELTA_TOKEN": TOKEN,
            "TORCH_DELTA_CHECKPOINT_ROOT": str(self.folder / "host"),
            "TORCH_DELTA_ALLOWED_PATHS": str(self.folder / "allowed"),
        }
        return Server(
            self.base,
            log=self.folder / f"{name}.log",
            dev=True,
            environment=variables | environment,
            options=LONG,
            start_s=400,
        )

    def checkpoint_at(self, version: int) -> Path:
        if version not in self.written:
            self.written[version] = self.versions.write(version, self.folder / f"v{version}")
        return self.written[version]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("served")
    base = checkpoint("qwen3")
    (folder / "bucket").mkdir()
    with FolderBucket(folder / "bucket") as bucket, Versions(base, folder / "bucket" / "run") as versions:
        yield World(folder, base, bucket, versions)


@pytest.fixture(scope="module")
def both(world: World) -> Iterator[tuple[Server, Server]]:
    """Started side by side: most of a start is waiting."""
    own = {"TORCH_DELTA_STREAM": STREAM, "TORCH_DELTA_AUTO_FOLLOW": "1", "TORCH_DELTA_AUTO_APPLY": "1"}
    own[crashpoints.ENVIRONMENT] = "vllm.reload_begun:1:kill"  # the last test asks it for a reload, and nothing before
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(world.start, "serving"), pool.submit(world.start, "following", **own)]
    servers = [future.result() for future in starting]
    yield servers[0], servers[1]
    for server in servers:
        server.close()


@pytest.fixture
def serving(both: tuple[Server, Server]) -> Server:
    return both[0]


@pytest.fixture
def fleet(serving: Server) -> Iterator[Fleet]:
    with Fleet([serving.url], token=TOKEN, stream=STREAM) as one:
        yield one


class Client(threading.Thread):
    """Streams completions one after the other until stopped; fails if one does."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.arrivals: list[float] = []
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._arrived = threading.Condition()
        self.start()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                for at, _ in self.server.stream(num_tokens=300):
                    with self._arrived:
                        self.arrivals.append(at)
                        self._arrived.notify_all()
        except BaseException as error:
            self.error = error

    def wait_for_more(self, number: int) -> None:
        """Return when this many more tokens have arrived."""
        with self._arrived:
            wanted = len(self.arrivals) + number
            assert self._arrived.wait_for(lambda: len(self.arrivals) >= wanted or self.error, WAIT_S), "no tokens"
        assert self.error is None, self.error

    def stop(self) -> None:
        self._stopping.set()
        self.join(WAIT_S)
        assert self.error is None, self.error


def worker(server: Server) -> Mapping[str, Any]:
    status, body = server.get("/torch_delta/status", headers=HEADERS)
    assert status == 200, body
    (one,) = body["workers"]
    return one


def wait_for(server: Server, what: str, happened: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """The worker's status, as soon as it says so."""
    deadline = time.monotonic() + WAIT_S
    while True:
        seen = worker(server)
        if happened(seen):
            return seen
        assert time.monotonic() < deadline, f"{what}: {seen}"
        time.sleep(0.1)  # a status has no event to wait for


def check_digests(server: Server, version: int) -> None:
    """All live weights are those of the version, by the server's own full digest."""
    status, body = server.post("/torch_delta/verify", {}, headers=HEADERS)
    assert status == 200, body
    seen = wait_for(
        server,
        "full digest",
        lambda seen: not seen["verifying"] and (seen["verified_full"] or {}).get("version") == version,
    )
    assert seen["verified_full"]["ok"], seen["verified_full"]
    assert seen["verified_full"]["wrong"] == []


def message(body: Any) -> str:
    assert isinstance(body, dict), body
    return body["error"]["message"]


def test_nothing_happens_before_a_stream_is_named(serving: Server) -> None:
    assert not worker(serving)["initialised"], "this test is the first"
    outputs = serving.greedy()
    for route in ("update", "prepare"):
        status, answer = serving.post(f"/torch_delta/{route}", {"version": 1}, headers=HEADERS)
        assert status in (400, 409), answer
        assert "init" in message(answer)
    assert serving.post("/start_weight_update")[0] == 200
    status, answer = serving.post("/update_weights", {"update_info": {"version": 1}})
    assert status >= 400
    assert "init" in message(answer)
    assert serving.get("/torch_delta/ready?version=0", headers=HEADERS)[0] == 503
    assert serving.greedy() == outputs


def test_versions_arrive_and_equal_a_fresh_engine(world: World, serving: Server, fleet: Fleet, fresh) -> None:
    versions = world.versions
    assert serving.greedy() == fresh(world.base).greedy
    outputs = []
    for publish in (lambda: versions.sparse(1), lambda: versions.dense(2), lambda: versions.sparse(3, fraction=0.1)):
        version = publish()
        report = fleet.update(version).reports[serving.url]
        assert (report.version, report.applied) == (version, True)
        assert report.pause_s < report.prepare_s + report.pause_s
        assert serving.get("/weight_info")[1] == {"weight_version": str(version)}
        assert fleet.ready(version) == {serving.url: True}
        outputs.append(serving.greedy())
        assert outputs[-1] == fresh(world.checkpoint_at(version)).greedy
        check_digests(serving, version)
    assert outputs[0] != outputs[1] != outputs[2], "versions must differ, or this shows nothing"
    seen = worker(serving)
    assert seen["routes"]["reload"] == {}, "all of this model goes by index writes"
    assert seen["last_apply"]["kind"] == "patch"


def test_tokens_go_on_during_a_slow_prepare(world: World, serving: Server, fleet: Fleet) -> None:
    version = world.versions.sparse(11)
    world.bucket.hold(f"parts/{version:020d}")
    client = Client(serving)
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(fleet.prepare, version)
        world.bucket.wait_until_held()
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            client.wait_for_more(20)  # fails where generation stands still until the prepare ends
        assert not preparing.done()
        assert worker(serving)["preparing"]["target"] == version
        held_s = time.monotonic() - began
        world.bucket.let_go()
        assert preparing.result()[serving.url].prepare_s >= held_s
    assert fleet.update(version).reports[serving.url].version == version
    client.stop()


def test_a_request_in_flight_goes_on_and_its_tokens_are_told_apart(world: World, serving: Server, fleet: Fleet) -> None:
    """F102: which weights made which token is in the answer of vLLM's own token route, from 0.32 on."""
    before = worker(serving)["version"]
    version = world.versions.dense(21)
    fleet.prepare(version)
    wanted = {
        "model": MODEL,
        "token_ids": [3, 17, 42],
        "sampling_params": {"max_tokens": 900, "temperature": 0.0, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        watched = serving.background_stream(num_tokens=900)
        answer = pool.submit(serving.post, "/inference/v1/generate", wanted, timeout_s=WAIT_S)
        watched.wait_for_first()
        began = time.monotonic()
        report = fleet.update(version).reports[serving.url]
        ended = time.monotonic()
        assert report.applied
        assert len(watched.tokens()) == 900
        status, body = answer.result()
    assert watched.num_between(0, began) > 0
    assert watched.num_between(ended, float("inf")) > 0
    assert status == 200, body
    (choice,) = body["choices"]
    assert len(choice["token_ids"]) == 900
    if not TELLS_WEIGHTS_APART:
        return
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [str(before), str(version)]
    assert spans[0]["start"] == 0 < spans[0]["end"] == spans[1]["start"] < spans[1]["end"] == len(choice["token_ids"])


def test_a_request_given_up_during_the_pause_harms_nobody(world: World, serving: Server, fleet: Fleet) -> None:
    """F112: its client goes away while the scheduler stands still; others, and the update, go on."""
    version = world.versions.sparse(25)
    fleet.prepare(version)
    staying = serving.background_stream(num_tokens=600)
    leaving = serving.stream(num_tokens=900)
    next(leaving)
    staying.wait_for_first()
    assert serving.post("/pause?mode=keep&clear_cache=true")[0] == 200
    leaving.close()  # the connection with it
    assert serving.post("/start_weight_update")[0] == 200
    assert serving.post("/update_weights", {"update_info": {"version": version}})[0] == 200
    assert serving.post("/finish_weight_update", {"weight_version": str(version)})[0] == 200
    assert serving.post("/resume")[0] == 200
    assert len(staying.tokens()) == 600
    check_digests(serving, version)


def test_a_cached_prefix_does_not_survive_its_weights(world: World, serving: Server, fleet: Fleet, engine) -> None:
    """F109: a prompt long enough to be cached, asked before and after.

    Few tokens: keys of other weights show in the first of them, while after so long a prompt the later ones may also
    differ because the server cut it into other batches than the engine here.
    """
    prompt = [[3 + (place * 7) % 240 for place in range(400)]]
    before = serving.greedy(prompt, num_tokens=6)
    version = world.versions.dense(31)
    fleet.update(version)
    after = serving.greedy(prompt, num_tokens=6)
    assert after != before
    assert after == engine(world.checkpoint_at(version), max_model_len=1024).greedy(prompt, num_tokens=6)


def test_vllms_own_routes_do_the_same(world: World, serving: Server, fresh) -> None:
    version = world.versions.sparse(41)
    with Fleet([serving.url], token=TOKEN, stream=STREAM, config=FleetConfig(routes="dev")) as fleet:
        report = fleet.update(version).reports[serving.url]
        assert list(report.phases_s) == ["pause", "start", "update", "check", "finish", "reset", "resume"]
        assert serving.get("/is_paused")[1] == {"is_paused": False}
        assert serving.get("/weight_info")[1] == {"weight_version": str(version)}
        assert serving.greedy() == fresh(world.checkpoint_at(version)).greedy
        assert fleet.update(version).reports[serving.url].pause_s == 0.0


def test_two_servers_on_a_host_fetch_once_and_one_follows_by_itself(
    world: World, both: tuple[Server, Server], fleet: Fleet, fresh
) -> None:
    serving, following = both
    version = world.versions.sparse(51)
    seen = wait_for(following, "applied at once", lambda seen: seen["version"] == version)
    assert seen["auto_follow"]
    fleet.update(version)
    reads = world.bucket.num_gets(f"parts/{version:020d}")
    assert reads
    assert set(reads.values()) == {1}, reads
    expected = fresh(world.checkpoint_at(version)).greedy
    assert serving.greedy() == following.greedy() == expected
    assert following.get("/weight_info")[1] == {"weight_version": str(version)}
    assert following.get(f"/torch_delta/ready?version={version}", headers=HEADERS)[0] == 200
    assert following.get(f"/torch_delta/ready?version={version + 1}", headers=HEADERS)[0] == 503
    assert following.get("/torch_delta/status", headers=HEADERS)[1]["auto_apply"]["num_applied"] >= 1


# -- bad input: an answer that says what to do, and the server goes on serving


def goes_on(server: Server, version: int, outputs: list[list[int]]) -> None:
    assert worker(server)["version"] == version
    assert server.greedy() == outputs
    assert server.get("/is_paused")[1] == {"is_paused": False}


def test_bad_requests_are_answered_and_change_nothing(world: World, serving: Server, fleet: Fleet) -> None:
    newest = world.versions.sparse(55)
    fleet.update(newest)
    version, outputs = worker(serving)["version"], serving.greedy()
    outside = world.folder / "outside"
    outside.mkdir(exist_ok=True)
    cases: list[tuple[str, object, int, str]] = [
        ("update", {"version": version - 1}, 409, "older than version"),
        ("update", {"version": newest + 100}, 409, "POST /torch_delta/prepare"),
        ("update", {"version": newest, "force": True}, 400, "unknown field 'force'; known: version, mode"),
        ("update", {}, 400, "version is missing"),
        ("update", {"version": "2"}, 400, "version is '2'"),
        ("prepare", {"version": 1, "url": "s3://other/stream"}, 400, "unknown field 'url'"),
        ("verify", {"deep": True}, 400, "unknown field 'deep'"),
        ("init", {"stream": STREAM, "strem": "typo"}, 400, "strem"),
        ("init", {"stream": str(outside)}, 400, "TORCH_DELTA_ALLOWED_PATHS"),
        ("init", {"stream": STREAM, "checkpoint": "../../elsewhere"}, 400, "TORCH_DELTA_ALLOWED_PATHS"),
        ("init", {"stream": STREAM, "base": "/etc"}, 400, "outside"),
        ("init", {"stream": STREAM, "auto_apply": True}, 400, "TORCH_DELTA_AUTO_APPLY"),
    ]
    for route, body, status, text in cases:
        got, answer = serving.post(f"/torch_delta/{route}", body, headers=HEADERS)
        assert got == status, (route, body, got, answer)
        assert text in message(answer), (route, body, answer)
    for route in ("init", "prepare", "update", "verify", "status", "ready"):
        ask = serving.get if route in ("status", "ready") else serving.post
        assert ask(f"/torch_delta/{route}")[0] == 401
        assert ask(f"/torch_delta/{route}", headers={"Authorization": "Bearer wrong"})[0] == 401
    pickled = {**HEADERS, "Content-Type": "application/octet-stream"}
    assert serving.post("/torch_delta/init", {"stream": STREAM}, headers=pickled)[0] == 415
    assert serving.post("/torch_delta/init", {"stream": "x" * 100_000}, headers=HEADERS)[0] == 413
    assert serving.get("/torch_delta/ready?version=-1", headers=HEADERS)[0] == 400
    goes_on(serving, version, outputs)


def test_vllms_routes_refuse_bad_updates_and_go_on(world: World, serving: Server, fleet: Fleet) -> None:
    fleet.update(world.versions.sparse(57))
    version, outputs = worker(serving)["version"], serving.greedy()
    for body, text in [
        ({"version": version + 100}, "prepare"),
        ({"version": version - 1}, str(version)),
        ({"version": version, "unknown": 1}, "known"),
        ({}, "version"),
    ]:
        assert serving.post("/pause?mode=keep&clear_cache=true")[0] == 200
        assert serving.post("/start_weight_update")[0] == 200
        status, answer = serving.post("/update_weights", {"update_info": body})
        assert status >= 400, (body, answer)
        assert text in message(answer)
        assert serving.post("/resume")[0] == 200
        goes_on(serving, version, outputs)
    status, answer = serving.post("/update_weights", {"update_info": {"version": version}})
    assert status >= 400, "an update outside a session"
    goes_on(serving, version, outputs)


def test_an_unreachable_store_and_a_strange_stream_are_named_and_the_server_goes_on(
    world: World, serving: Server, fleet: Fleet, checkpoint, tmp_path: Path
) -> None:
    fleet.update(world.versions.sparse(61))
    version, outputs = worker(serving)["version"], serving.greedy()
    newer = world.versions.sparse(62)
    world.bucket.answering = False
    try:
        status, answer = serving.post(
            "/torch_delta/prepare", {"version": newer, "timeout_s": 3, "wait": True}, headers=HEADERS, timeout_s=WAIT_S
        )
        assert status >= 500, answer
        assert "s3://bucket/run" in message(answer), answer
        goes_on(serving, version, outputs)
    finally:
        world.bucket.answering = True
    for name, options, says in [
        ("strange", {"hidden_size": 96}, "does not hold the tensors of the stream"),
        ("astray", {"seed": 1}, "is not the base of stream"),  # the right names and shapes, of another run
    ]:
        other = checkpoint("qwen3", **options)
        with Versions(other, world.folder / "bucket" / name) as strange:
            strange.sparse(1)
            with Fleet([serving.url], token=TOKEN, stream=f"s3://bucket/{name}") as astray:
                with pytest.raises(FleetFailed) as caught:
                    astray.update(1)
                assert says in str(caught.value)
        assert serving.greedy() == outputs
        assert serving.get("/is_paused")[1] == {"is_paused": False}
    fleet.update(newer)  # back to its own stream: the same server follows on
    assert worker(serving)["version"] == newer


def test_a_server_that_dies_in_a_reload_is_left_out_and_catches_up_when_it_is_back(
    world: World, both: tuple[Server, Server], fresh
) -> None:
    """Its engine is killed at the crash point between the decision to reload and the first tensor."""
    serving, following = both
    with Fleet([serving.url, following.url], token=TOKEN, stream=STREAM) as fleet:
        version = world.versions.sparse(71)
        assert sorted(fleet.update(version).reports) == sorted([serving.url, following.url])
        version = world.versions.dense(72)
        # Which of the two is faster, its own following or the fleet, must not decide what happens.
        wait_for(following, "applied at once", lambda seen: seen["version"] == version)
        with Fleet(
            [serving.url, following.url],
            token=TOKEN,
            stream=STREAM,
            config=FleetConfig(mode="reload", resume_timeout_s=5),
        ) as reloading:
            report = reloading.update(version)
        assert list(report.failures) == [following.url]
        assert report.reports[serving.url].version == version
        following.process.wait(WAIT_S)  # vLLM's front end does not outlive its engine
        with world.start("again", TORCH_DELTA_STREAM=STREAM) as again:
            fleet.remove(following.url)
            fleet.add(again.url, wait_s=WAIT_S)
            assert fleet.ready(version) == {serving.url: True, again.url: True}
            assert again.greedy() == serving.greedy() == fresh(world.checkpoint_at(version)).greedy
            version = world.versions.sparse(73)
            assert sorted(fleet.update(version).reports) == sorted([serving.url, again.url])
