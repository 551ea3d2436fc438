"""AsyncGRPOTrainer: after every synchronisation the server serves the trainer's weights, bit for bit."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from torch_delta.errors import BaseMismatch, CaptureError, FleetFailed, TorchDeltaError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = ([2, 22, 4, 28, 3], [2, 5, 3])


@pytest.fixture
def stream(shared: Path, tmp_path: Path) -> Path:
    return shared / tmp_path.name / "stream"


class Witness:
    """A callback that runs after the synchronisation of a step: what the trainer holds, and what the server does."""

    def __new__(cls, server: Server) -> Any:
        from transformers import TrainerCallback

        class _Witness(TrainerCallback):
            def __init__(self) -> None:
                self.seen: dict[int, tuple[int, dict[str, np.ndarray], list[list[int]]]] = {}
                self.trainer: Any = None

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                from tests.trl.trainers import served_bits

                version = self.trainer.delta_sync.publisher.version
                self.seen[state.global_step] = version, served_bits(kwargs["model"]), greedy(server)

        return _Witness()


def greedy(server: Server) -> list[list[int]]:
    body = {
        "model": server.get("/v1/models")[1]["data"][0]["id"],
        "prompt": [list(prompt) for prompt in PROMPTS],
        "max_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def last_callback(trainer: Any, witness: Any) -> Any:
    """After the trainer's own synchronisation."""
    witness.trainer = trainer
    trainer.add_callback(witness)
    return witness


def write_served(model: Path, folder: Path, bits: dict[str, np.ndarray]) -> Path:
    """A checkpoint with these weights, written by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.load_state_dict({name: torch.from_numpy(value).view(torch.bfloat16) for name, value in bits.items()})
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def fresh_greedy(folder: Path) -> list[list[int]]:
    from tests.vllm.engines import Engine

    with Engine(folder, delta=True) as engine:
        return engine.greedy(PROMPTS, num_tokens=12)


def pulled(stream: Path, version: int, folder: Path, base: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    import torch_delta

    torch_delta.pull(str(stream), folder, version=version, base=str(base))
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return {name: value.view(torch.int16).numpy() for name, value in weights.items()}


def test_every_step_is_served(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model)
    trainer = async_trainer(model, tmp_path / "out", sync, url=server.url, max_steps=3, gradient_accumulation_steps=2)
    witness = last_callback(trainer, Witness(server))
    trainer.train()

    assert sorted(witness.seen) == [1, 2, 3]
    assert [version for version, _, _ in witness.seen.values()] == [1, 2, 3]
    assert trainer.rollout_worker.versions == [1, 2, 3, 4]  # TRL's own count: the cold one is its first
    for step, (version, bits, said) in witness.seen.items():
        got = pulled(stream, version, tmp_path / f"pulled-{step}", model)
        assert got.keys() == bits.keys()
        assert all(np.array_equal(got[name], bits[name]) for name in bits), f"version {version}"
        assert said == fresh_greedy(write_served(model, tmp_path / f"fresh-{step}", bits)), f"version {version}"
    assert server.get("/weight_info")[1]["weight_version"] == "3"

    rows = [row for row in trainer.state.log_history if "delta/changed_fraction" in row]
    assert len(rows) == 3
    for row in rows:
        assert 0 < row["delta/changed_fraction"] <= 1
        assert row["delta/stored_bytes"] > 0
        assert row["delta/staleness"] == 0
        assert row["delta/servers"] == 1
        assert all(math.isfinite(row[f"delta/{name}"]) for name in ("publish_s", "prepare_s", "pause_s", "sync_s"))


def test_two_steps_per_synchronisation_are_one_version(
    model: Path, server: Server, stream: Path, tmp_path: Path
) -> None:
    from tests.trl.trainers import async_trainer, served_bits
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model)
    trainer = async_trainer(model, tmp_path / "out", sync, url=server.url, max_steps=4, weight_sync_steps=2)
    trainer.train()
    got = pulled(stream, 2, tmp_path / "pulled", model)
    bits = served_bits(trainer.accelerator.unwrap_model(trainer.model))
    assert all(np.array_equal(got[name], bits[name]) for name in bits)
    assert server.get("/weight_info")[1]["weight_version"] == "2"
    assert sync.last is not None
    assert sync.last.version == 2
    assert sync.last.published is not None
    assert sync.last.published.num_steps == 2
    assert "delta v2 (step 4)" in str(sync.last)


def test_the_wrong_base_is_refused(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    other = tmp_path / "other"
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    other.mkdir()
    save_file(weights, other / "model.safetensors")
    (other / "config.json").write_text((model / "config.json").read_text())
    trainer = async_trainer(model, tmp_path / "out", DeltaSync(stream, base=other), url=server.url)
    before = greedy(server)
    with pytest.raises(BaseMismatch, match="norm"):
        trainer.train()
    assert greedy(server) == before
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks  # nothing is left behind


def test_no_server(model: Path, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer
    from tests.vllm.servers import free_port
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    url = f"http://127.0.0.1:{free_port()}"
    sync = DeltaSync(stream, base=model, fleet=FleetConfig(status_timeout_s=1.0))
    trainer = async_trainer(model, tmp_path / "out", sync, url=url)
    with pytest.raises(TorchDeltaError, match=url):
        trainer.train()


def test_a_transfer_without_its_callback_is_refused(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model)
    trainer = async_trainer(model, tmp_path / "out", sync, url=server.url)
    trainer.callback_handler.callbacks.pop(0)
    with pytest.raises(TorchDeltaError, match=r"DeltaSync\.wire"):
        trainer.train()


def test_adapters_are_refused(model: Path, tmp_path: Path) -> None:
    from torch_delta_trl.contract import refuse_what_cannot_be_exact

    class Peft:
        def __init__(self) -> None:
            self.peft_config = {"default": object()}

    class Trainer:
        model = Peft()

        class accelerator:
            @staticmethod
            def unwrap_model(model: object) -> object:
                return model

    with pytest.raises(CaptureError, match=r"PEFT adapters.*enable-lora"):
        refuse_what_cannot_be_exact(Trainer())


def test_training_goes_on_from_its_checkpoint(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer, served_bits
    from torch_delta_trl import DeltaSync

    def build(**options: Any) -> Any:
        sync = DeltaSync(stream, base=model)
        return async_trainer(
            model, tmp_path / "out", sync, url=server.url, save_strategy="steps", save_steps=2, **options
        )

    build(max_steps=2).train()
    again = build(max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert again.delta_sync.last.version == 4
    got = pulled(stream, 4, tmp_path / "pulled", model)
    bits = served_bits(again.accelerator.unwrap_model(again.model))
    assert all(np.array_equal(got[name], bits[name]) for name in bits)
    assert server.get("/weight_info")[1]["weight_version"] == "4"


def test_a_server_that_died_is_left_out_and_catches_up(model: Path, shared: Path, stream: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from tests.trl.conftest import start_server
    from tests.trl.trainers import async_trainer
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    with start_server(model, shared, "first") as first, start_server(model, shared, "second") as second:

        class Kill(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 1:
                    second.kill()

        fleet = FleetConfig(status_timeout_s=5.0)
        sync = DeltaSync(stream, base=model, servers=[first.url, second.url], fleet=fleet)
        trainer = async_trainer(model, tmp_path / "out", sync, url=first.url, max_steps=3)
        trainer.add_callback(Kill())
        trainer.train()
        rows = [row for row in trainer.state.log_history if "delta/servers_behind" in row]
        assert [row["delta/servers_behind"] for row in rows] == [0, 1, 1]
        assert first.get("/weight_info")[1]["weight_version"] == "3"


def test_with_no_server_left_the_run_ends(model: Path, shared: Path, stream: Path, tmp_path: Path) -> None:
    """And what was committed is there for whoever comes next."""
    from transformers import TrainerCallback

    from tests.trl.conftest import start_server
    from tests.trl.trainers import async_trainer
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    with start_server(model, shared, "only") as only:

        class Kill(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 1:
                    only.kill()

        sync = DeltaSync(stream, base=model, fleet=FleetConfig(status_timeout_s=2.0))
        trainer = async_trainer(model, tmp_path / "out", sync, url=only.url, max_steps=3)
        trainer.add_callback(Kill())
        with pytest.raises(FleetFailed, match=only.url):
            trainer.train()
    commits = sorted(path.name for path in (stream / "commits").iterdir())
    assert [int(name.removesuffix(".json")) for name in commits] == [1, 2]
    assert json.loads((stream / "commits" / commits[-1]).read_text().splitlines()[0])["version"] == 2
