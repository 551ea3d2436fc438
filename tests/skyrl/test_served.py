"""SkyRL's trainer side, its own server with two vLLM ranks, and a real object store: every call over HTTP.

One server for all tests, in this order: starting one takes most of a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests._dist import run_ranks
from tests.skyrl import older
from tests.skyrl.checkpoints import bits_of, read_bits, same
from tests.skyrl.serving import serving
from tests.skyrl.toys import step
from tests.store.servers import find_program, running_seaweed, use
from tests.vllm.tiny import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.servers import Server

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("seat")]

WAIT_S = 120.0


class Run:
    """A trainer of one rank, the server, and the bucket between them."""

    def __init__(self, folder: Path, server: Server, base: Path, stream: str) -> None:
        from safetensors.torch import load_file

        from tests.skyrl.trainers import build, weight_source

        self.server, self.base, self.stream = server, base, stream
        self.tensors = load_file(str(base / "model.safetensors"))
        self.engine = build(
            base,
            stream,
            [server.url],
            weight_source(self.tensors),
            folder=folder,
            local_checkpoint_dir=str(folder / "host"),
        )

    def ranks(self) -> list[dict[str, Any]]:
        status, body = self.server.post("/collective_rpc", {"method": "torch_delta_status"})
        assert status == 200, body
        return sorted(body["results"], key=lambda rank: rank["rank"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, seat: None) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("served")
    import obstore  # noqa: F401 - a lane without it is to fail

    assert find_program("weed") is not None, "scripts/install_skyrl.py installs SeaweedFS"
    base = write_checkpoint(folder / "base", "qwen3")
    (folder / "weed").mkdir()
    with pytest.MonkeyPatch.context() as patch, running_seaweed(folder / "weed") as bucket:
        use(patch, bucket.environment)
        with serving(base, log=folder / "server.log", environment=bucket.environment, num_ranks=2) as server:
            made = Run(folder, server, base, bucket.fresh_url())
            yield made
            from tests.skyrl.trainers import end

            end(made.engine)


def verified(run: Run, version: int) -> list[bool]:
    """What a full digest of the live weights says on each rank."""
    from torch_delta.store.waiting import poll

    status, body = run.server.post("/collective_rpc", {"method": "torch_delta_verify"})
    assert status == 200, body

    def digested() -> list[bool] | None:
        found = [rank["verified_full"] or {} for rank in run.ranks()]
        return [one["ok"] for one in found] if all(one.get("version") == version for one in found) else None

    found = poll(digested, phase="full digest", peer=run.server.url, timeout_s=WAIT_S)
    assert found is not None
    return found


def test_rounds_over_http_and_s3_are_bitwise_on_both_ranks(run: Run) -> None:
    assert run.stream.startswith("s3://")
    before = run.server.greedy()
    watched = run.server.background_stream(num_tokens=700)
    watched.wait_for_first()
    for number in range(1, 4):
        step(run.tensors, number)
        run.engine.send_weights()
        assert run.engine.version == number
        ranks = run.ranks()
        assert [rank["version"] for rank in ranks] == [number, number]
        assert [rank["last_apply"]["kind"] for rank in ranks] == ["patch", "patch"]
    assert len(watched.tokens()) == 700, "generation goes on through the pauses"
    assert verified(run, 3) == [True, True]
    assert run.server.greedy() != before


def test_the_hosts_copy_is_what_was_sent(run: Run, tmp_path: Path) -> None:
    from torch_delta import Follower, LocalCheckpoint

    with LocalCheckpoint(tmp_path / "late", base=run.engine._init_info.base_model_path) as late:
        with Follower(run.stream) as follower:
            for _ in follower.apply_to(late, until=3):
                pass
        assert same(read_bits(late.path), bits_of(run.tensors)) == []


def test_a_refused_call_changes_nothing_and_leaves_the_ranks_in_step(run: Run) -> None:
    outputs = run.server.greedy()
    elsewhere = {"target_version": 3, "sync_dir": "s3://td-tests/another"}
    refusals = [
        ("/fetch_weights", elsewhere, "delta_weight_sync.sync_dir"),
        ("/fetch_weights", {"target_version": -1}, "expected a version"),
        ("/fetch_weights", {}, "target_version"),
    ]
    for path, body, message in refusals:
        status, answer = run.server.post(path, body)
        assert status >= 400, answer
        assert message in str(answer)
    assert run.server.post("/pause?mode=keep&clear_cache=false")[0] == 200
    assert run.server.post("/start_weight_update")[0] == 200
    status, answer = run.server.post("/update_weights", {"update_info": {"target_version": 4}})
    assert status >= 400, answer
    assert run.server.post("/resume")[0] == 200
    assert [(rank["rank"], rank["version"]) for rank in run.ranks()] == [(0, 3), (1, 3)]
    assert run.server.greedy() == outputs
    step(run.tensors, 9)
    run.engine.send_weights()
    assert [rank["version"] for rank in run.ranks()] == [4, 4]
    assert verified(run, 4) == [True, True]


def test_trainers_of_the_older_release_bring_this_server_to_another_stream(run: Run, tmp_path: Path) -> None:
    assert older.FOLDER.is_dir(), "scripts/install_skyrl.py unpacks it"
    found = run_ranks(
        older.sender_rounds,
        2,
        timeout_s=300,
        base=str(run.base),
        stream=f"{run.stream}-of-another",
        url=run.server.url,
        folder=str(tmp_path),
        num_rounds=2,
        seed=3,
    )
    assert [one["release"] for one in found] == ["0.3.0"] * 2
    assert min(found[0]["changed"]) > 0
    ranks = run.ranks()
    assert [rank["version"] for rank in ranks] == [2, 2]
    assert [rank["last_apply"]["kind"] for rank in ranks] == ["patch", "patch"]
    assert verified(run, 2) == [True, True]
    assert same(read_bits(tmp_path / "host"), read_bits(tmp_path / "wanted")) == []
