"""Real vLLM with SkyRL's worker extension and backend name, in this process: SkyRL's calls, our engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.engines import Engine, differing
from tests.vllm.tiny import Versions, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("seat")]

EXTENSION = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap"


class Served:
    """An engine as SkyRL starts it, and what SkyRL's client asks of it, in vLLM's offline API."""

    def __init__(self, folder: Path) -> None:
        self.base = write_checkpoint(folder / "base", "qwen3")
        self.stream = folder / "stream"
        self.versions = Versions(self.base, self.stream)
        self.engine = Engine(self.base, weight_transfer_config={"backend": "delta"}, worker_extension_cls=EXTENSION)
        self.llm = self.engine.llm
        self.init_info = {
            "stream": str(self.stream),
            "base_model_path": str(self.base),
            "local_checkpoint_dir": str(folder / "host"),
        }

    def fetch(self, version: int) -> dict[str, Any]:
        kwargs = {"target_version": version, "sync_dir": str(self.stream), "uri": f"{self.stream}/{version}"}
        (reply,) = self.llm.collective_rpc("fetch_weights", kwargs=kwargs)
        return reply

    def load(self, version: int) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"target_version": version, "version": version}})
        self.llm.finish_weight_update()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, seat: None) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    yield made
    made.engine.close()
    made.versions.close()


def test_rounds_by_index_writes_are_bitwise(served: Served, tmp_path: Path) -> None:
    from torch_delta.errors import RequestRefused

    worker = served.engine.worker
    assert type(worker.weight_transfer_engine).__module__ == "torch_delta_skyrl.receiver"
    with pytest.raises(RequestRefused, match="follows no stream"):
        served.fetch(1)
    served.llm.init_weight_transfer_engine({"init_info": served.init_info})
    for seed in range(2):
        version = served.versions.sparse(seed)
        reply = served.fetch(version)
        assert reply["status"] == "ok"
        served.load(version)
    (status,) = served.llm.collective_rpc("torch_delta_status")
    assert status["version"] == 2
    assert status["last_apply"]["kind"] == "patch", status["last_apply"]
    with Engine(served.versions.write(2, tmp_path / "two"), delta=True) as fresh:
        assert differing(served.engine.parameters(), fresh.parameters()) == []
        assert served.engine.greedy() == fresh.greedy()


def test_what_is_not_fetched_is_not_loaded(served: Served) -> None:
    from torch_delta.errors import RequestRefused

    before = served.engine.parameters()
    version = served.versions.sparse(7)
    with pytest.raises(RequestRefused, match="not prepared here"):
        served.load(version)
    assert differing(before, served.engine.parameters()) == []
    served.fetch(version)
    served.load(version)
    assert differing(before, served.engine.parameters()) != []


def test_a_version_of_another_sync_dir_is_refused(served: Served) -> None:
    from torch_delta.errors import RequestRefused

    kwargs = {"target_version": 1, "sync_dir": "/another/run"}
    with pytest.raises(RequestRefused, match=r"same delta_weight_sync\.sync_dir"):
        served.llm.collective_rpc("fetch_weights", kwargs=kwargs)


def test_skyrls_own_trainer_is_found_out(served: Served) -> None:
    from torch_delta.errors import RequestRefused

    own = {"base_model_path": str(served.base), "local_checkpoint_dir": "/tmp/x", "cloud_download_workers": 4}
    with pytest.raises(RequestRefused, match="TORCH_DELTA_SKYRL=1"):
        served.llm.init_weight_transfer_engine({"init_info": own})
