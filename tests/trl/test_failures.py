"""A store that is down for a while, a server that dies and comes back, and none that is left."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.trl import oracle
from torch_delta.errors import FleetFailed, PublishFailed, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Mortal:
    """A server that tests may end and start again at the same address."""

    def __init__(self, model: Path, shared: Path) -> None:
        from tests.trl.conftest import start_server

        self._start = lambda: start_server(model, shared, "mortal")
        self.server = self._start()

    @property
    def url(self) -> str:
        return self.server.url

    def restart(self) -> None:
        with mock.patch("tests.vllm.servers.free_port", return_value=self.server.port):
            self.server = self._start()


@pytest.fixture(scope="module")
def mortal(model: Path, shared: Path) -> Iterator[Mortal]:
    started = Mortal(model, shared)
    yield started
    started.server.close()


def test_a_store_that_is_down_for_a_while(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    """Uploads and a commit of the second version fail, and are repeated within the publisher's deadlines."""
    from tests.trl.trainers import async_trainer
    from torch_delta import PublishConfig
    from torch_delta.store import LocalStore
    from torch_delta.testing import Fault, FaultyStore
    from torch_delta.testing.faults import fail_before
    from torch_delta_trl import DeltaSync

    down = StoreUnavailable("503 from the object store")
    with LocalStore(stream) as inner:
        store = FaultyStore(
            inner,
            [
                Fault("put_new", "*parts*", nth=2, times=2, effect=fail_before(down)),
                Fault("put_new", "*commits*", nth=2, times=2, effect=fail_before(down)),
            ],
        )
        sync = DeltaSync(
            store,
            base=model,
            server_stream=str(stream),
            publish=PublishConfig(num_put_attempts=3, retry_delay_s=0.01),
        )
        trainer = async_trainer(model, tmp_path / "out", sync, url=server.url, max_steps=3)
        at: dict[int, oracle.Bits] = {}
        oracle.after_sync(trainer, lambda step, live: at.update({step: oracle.served_bits(live)}))
        trainer.train()
        store.assert_fired()
    assert oracle.weight_version(server) == "3"
    for version, bits in at.items():
        assert oracle.same(oracle.pulled(stream, version, tmp_path / f"pulled-{version}", model), bits)


def test_a_store_that_stays_down_ends_the_run(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    """The server goes on with the version before, and is not paused."""
    from tests.trl.trainers import async_trainer
    from torch_delta import PublishConfig
    from torch_delta.store import LocalStore
    from torch_delta.testing import Fault, FaultyStore
    from torch_delta.testing.faults import fail_before
    from torch_delta_trl import DeltaSync

    with LocalStore(stream) as inner:
        down = fail_before(StoreUnavailable("503 from the object store"))
        store = FaultyStore(inner, [Fault("put_new", "*parts*", nth=2, times=None, effect=down)])
        sync = DeltaSync(
            store,
            base=model,
            server_stream=str(stream),
            publish=PublishConfig(num_put_attempts=2, retry_delay_s=0.01),
        )
        trainer = async_trainer(model, tmp_path / "out", sync, url=server.url, max_steps=3)
        said: dict[int, list[list[int]]] = {}
        oracle.after_sync(trainer, lambda step, _: said.update({step: oracle.greedy(server)}))
        with pytest.raises(PublishFailed, match="503 from the object store"):
            trainer.train()
        store.assert_fired()
    assert sorted(said) == [1]
    assert oracle.greedy(server) == said[1]
    assert oracle.weight_version(server) == "1"
    assert server.get("/is_paused")[1] == {"is_paused": False}


def test_a_server_that_died_is_left_out_and_catches_up(
    model: Path, server: Server, mortal: Mortal, stream: Path, tmp_path: Path
) -> None:
    """Killed after the first step, started again after the second; at the fourth it is with the others again."""
    from tests.trl.trainers import async_trainer
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model, servers=[server.url, mortal.url], fleet=FleetConfig(status_timeout_s=5.0))
    trainer = async_trainer(model, tmp_path / "out", sync, url=server.url, max_steps=4, logging_steps=1)
    at: dict[int, oracle.Bits] = {}

    def see(step: int, live: Any) -> None:
        at[step] = oracle.served_bits(live)
        if step == 1:
            mortal.server.kill()
        if step == 2:
            mortal.restart()
        if step == 3:
            sync.fleet.wait_caught_up(60.0)

    oracle.after_sync(trainer, see)
    trainer.train()
    behind = [row["delta/servers_behind"] for row in trainer.state.log_history if "delta/servers_behind" in row]
    assert behind[:2] == [0, 1]
    assert behind[-1] == 0
    stale = [row["delta/staleness"] for row in trainer.state.log_history if "delta/staleness" in row]
    assert stale[0] == stale[-1] == 0
    assert [oracle.weight_version(one) for one in (server, mortal.server)] == ["4", "4"]
    fresh = oracle.fresh_greedy(oracle.write_served(model, tmp_path / "fresh", at[4]))
    assert oracle.greedy(mortal.server) == oracle.greedy(server) == fresh


@pytest.mark.dist
def test_two_ranks_of_fsdp(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    """Every synchronisation is exact; a rank gathers nothing for it."""
    ranks = train_two(model, tmp_path, stream, server.url)
    assert [rank["steps"] for rank in ranks] == [[1, 2, 3]] * 2
    assert [rank["streamed"] for rank in ranks] == [0, 0]
    assert ranks[0]["greedy"] == [
        oracle.fresh_greedy(oracle.write_served(model, tmp_path / f"fresh-{step}", load(tmp_path / f"at-{step}.npz")))
        for step in (1, 2, 3)
    ]
    for step in (1, 2, 3):
        bits = load(tmp_path / f"at-{step}.npz")
        assert oracle.same(oracle.pulled(stream, step, tmp_path / f"pulled-{step}", model), bits), f"step {step}"
    assert oracle.weight_version(server) == "3"


@pytest.mark.dist
def test_a_store_that_is_down_for_one_rank_for_a_while(
    model: Path, server: Server, stream: Path, tmp_path: Path
) -> None:
    """FSDP2: uploads of one rank fail at the second version and are repeated; nobody else notices."""
    ranks = train_two(model, tmp_path, stream, server.url, down="a while")
    assert [rank["error"] for rank in ranks] == [None, None]
    assert [rank["steps"] for rank in ranks] == [[1, 2, 3]] * 2
    for step in (1, 2, 3):
        bits = load(tmp_path / f"at-{step}.npz")
        assert oracle.same(oracle.pulled(stream, step, tmp_path / f"pulled-{step}", model), bits), f"step {step}"
    assert oracle.weight_version(server) == "3"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("down", "error", "says"),
    [("for good", PublishFailed, "rank 1.*503 from the object store"), ("at the server", FleetFailed, "version 2")],
)
def test_a_synchronisation_that_fails_reaches_every_rank(
    down: str, error: type[Exception], says: str, model: Path, server: Server, stream: Path, tmp_path: Path
) -> None:
    """FSDP2: one rank cannot upload, or the server cannot read. All end in the same step; the server goes on."""
    ranks = train_two(model, tmp_path, stream, server.url, down=down)
    for rank in ranks:
        assert rank["error"] == error.__name__
        assert re.search(says, rank["message"]), rank["message"]
        assert rank["steps"] == [1]
        assert rank["synced"] == 1
    assert oracle.greedy(server) == ranks[0]["greedy"][0]
    assert oracle.weight_version(server) == "1"
    assert server.get("/is_paused")[1] == {"is_paused": False}


@pytest.mark.dist
@pytest.mark.parametrize("sharded", [True, False], ids=["fsdp", "ddp"])
def test_with_no_server_left_every_rank_ends(
    sharded: bool, model: Path, mortal: Mortal, stream: Path, tmp_path: Path
) -> None:
    """And what was committed is there for whoever comes next."""
    if mortal.server.process.poll() is not None:
        mortal.restart()
    ranks = train_two(
        model, tmp_path, stream, mortal.url, sharded=sharded, kill_after_first_step=mortal.server.process.pid
    )
    for rank in ranks:
        assert rank["error"] == FleetFailed.__name__
        assert mortal.url in rank["message"]
        assert rank["steps"] == [1]
    commits = sorted(path.name for path in (stream / "commits").iterdir())
    assert [int(name.removesuffix(".json")) for name in commits] == [1, 2]
    assert json.loads((stream / "commits" / commits[-1]).read_text().splitlines()[0])["version"] == 2


def train_two(model: Path, out: Path, stream: Path, url: str, *, sharded: bool = True, **options: Any) -> list[Any]:
    """What two ranks say that trained; see `ranks.train`."""
    from tests._dist import run_ranks
    from tests.trl.ranks import train

    where = {"model": str(model), "out": str(out), "stream": str(stream), "url": url}
    ranks = run_ranks(train, 2, timeout_s=240.0, sharded=sharded, **where, **options)
    assert [rank["sharded"] for rank in ranks] == [sharded, sharded]
    return ranks


def load(path: Path) -> oracle.Bits:
    import numpy as np

    with np.load(path) as found:
        return dict(found)
