"""A real server with two ranks (TP=2), without our plugin's routes: vLLM's own, and no flag but the backend's name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.servers import Server
from tests.vllm.tiny import Versions
from torch_delta.errors import FleetFailed
from torch_delta.vllm.fleet import Fleet, FleetConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = {"tensor-parallel-size": 2, "max-model-len": 1024}
WAIT_S = 120.0


def start(folder: Path, log: Path, **environment: str) -> Server:
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | environment
    return Server(folder, log=log, plugin=False, dev=True, environment=variables, options=TWO_RANKS, start_s=400)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Iterator[Versions]:
    folder = tmp_path_factory.mktemp("stream")
    with Versions(checkpoint("qwen3_moe"), folder / "run") as made:  # experts too; test_served.py has a dense model
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, versions: Versions) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {"TORCH_DELTA_CHECKPOINT_ROOT": str(folder / "host"), "TORCH_DELTA_STREAM": versions.url}
    with start(versions.base, folder / "log", **environment) as one:
        yield one


def statuses(server: Server) -> list[dict[str, Any]]:
    status, body = server.post("/collective_rpc", {"method": "torch_delta_status"})
    assert status == 200, body
    return sorted(body["results"], key=lambda worker: worker["rank"])


def test_both_ranks_follow_and_equal_a_fresh_server(server: Server, versions: Versions, tmp_path: Path) -> None:
    outputs = []
    usual = {name: (range(bits.size), bits.reshape(-1)) for name, bits in versions.bits(0).items()}
    publishing = (
        lambda: versions.sparse(1),
        lambda: versions.special(2),
        lambda: versions.edit(usual),  # NaNs make the same tokens whatever else is wrong
        lambda: versions.dense(3),
    )
    with Fleet([server.url]) as fleet:  # its operator named the stream
        for publish in publishing:
            version = publish()
            report = fleet.update(version).reports[server.url]
            assert report.phases_s.keys() >= {"pause", "update", "resume"}, "vLLM's own routes"
            assert [worker["version"] for worker in statuses(server)] == [version, version]
            assert server.get("/weight_info")[1] == {"weight_version": str(version)}
        version = versions.sparse(4)
        fleet.prepare(version)
        watched = server.background_stream(num_tokens=600)
        watched.wait_for_first()
        assert fleet.update(version).reports[server.url].applied
        assert len(watched.tokens()) == 600
        outputs = server.greedy()
        fleet.verify()
        seen = wait_for_digest(fleet, server, version)
    assert [worker["verified_full"]["ok"] for worker in seen] == [True, True]
    assert {worker["routes"]["num_routed"] for worker in seen} == {len(versions.bits())}
    folder = versions.write(version, tmp_path / "pulled")
    with start(folder, tmp_path / "fresh.log") as fresh:
        assert fresh.greedy() == outputs
    assert len({token for tokens in outputs for token in tokens}) > 1


def wait_for_digest(fleet: Fleet, server: Server, version: int) -> list[dict[str, Any]]:
    from torch_delta.store.waiting import poll

    def digested() -> list[dict[str, Any]] | None:
        seen = [dict(worker.raw) for worker in fleet.status().servers[server.url].workers]
        done = all((w["verified_full"] or {}).get("version") == version and not w["verifying"] for w in seen)
        return seen if done else None

    found = poll(digested, phase="full digest", peer=server.url, timeout_s=WAIT_S)
    assert found is not None
    return found


def test_bad_updates_leave_both_ranks_in_step(server: Server, versions: Versions) -> None:
    """An exception on one rank alone would shift vLLM's replies by one for ever; later answers show that none did."""
    with Fleet([server.url]) as fleet:
        version = versions.sparse(11)
        fleet.update(version)
        outputs = server.greedy()
        for body in ({"version": version + 50}, {"version": version - 1}, {"version": version, "typo": 1}):
            assert server.post("/pause?mode=keep&clear_cache=true")[0] == 200
            assert server.post("/start_weight_update")[0] == 200
            status, answer = server.post("/update_weights", {"update_info": body})
            assert status >= 400, answer
            assert server.post("/resume")[0] == 200
            assert [worker["rank"] for worker in statuses(server)] == [0, 1]
            assert server.greedy() == outputs
        with pytest.raises(FleetFailed):
            Fleet([server.url], config=FleetConfig(prepare_timeout_s=3)).update(version + 50)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: statuses(server), range(6)))
        assert {(seen[0]["version"], seen[1]["version"]) for seen in answers} == {(version, version)}
        assert fleet.update(versions.sparse(12)).reports[server.url].version == version + 1
