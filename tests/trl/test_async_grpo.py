"""AsyncGRPOTrainer: after every synchronisation the server serves the trainer's weights, bit for bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.trl import oracle
from torch_delta.errors import BaseMismatch, TorchDeltaError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def weights(trainer: Any) -> oracle.Bits:
    return oracle.served_bits(trainer.accelerator.unwrap_model(trainer.model))


def test_every_step_is_served(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    """Two micro-batches per step, activations recomputed; the cold synchronisation is the trainer's first."""
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    trainer = async_trainer(
        model,
        tmp_path / "out",
        DeltaSync(stream, base=model),
        url=server.url,
        max_steps=3,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        logging_steps=1,
    )
    seen: dict[int, tuple[int, oracle.Bits, list[list[int]]]] = {}

    def see(step: int, live: Any) -> None:
        seen[step] = trainer.delta_sync.publisher.version, oracle.served_bits(live), oracle.greedy(server)

    oracle.after_sync(trainer, see)
    trainer.train()

    assert [(step, version) for step, (version, _, _) in seen.items()] == [(1, 1), (2, 2), (3, 3)]
    assert trainer.rollout_worker.versions == [1, 2, 3, 4]  # TRL's own count: the cold one is its first
    for step, (version, bits, said) in seen.items():
        assert oracle.same(oracle.pulled(stream, version, tmp_path / f"pulled-{step}", model), bits), f"step {step}"
        fresh = oracle.fresh_greedy(oracle.write_served(model, tmp_path / f"fresh-{step}", bits))
        assert said == fresh, f"step {step}"
    assert oracle.weight_version(server) == "3"

    rows = [row for row in trainer.state.log_history if "delta/changed_fraction" in row]
    assert [row["delta/version"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 < row["delta/changed_fraction"] <= 1
        assert 0 < row["delta/stored_share"] < 1
        assert row["delta/stored_bytes"] > 0
        assert row["delta/server_version"] == row["delta/version"]
        assert row["delta/staleness"] == 0
        assert row["delta/servers"] == 1
        seconds = ("publish_s", "capture_s", "encode_s", "upload_s", "commit_s", "prepare_s", "pause_s", "sync_s")
        assert all(0 <= row[f"delta/{name}"] < math.inf for name in seconds)
        assert row["delta/pause_s"] < row["delta/sync_s"]
        assert "perf/weight_sync_pause_s" in row  # TRL's own, of which nothing is left
        assert row["perf/weight_sync_transfer_s"] < row["delta/sync_s"]


def test_two_steps_per_synchronisation_are_one_version(
    model: Path, server: Server, stream: Path, tmp_path: Path
) -> None:
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model)
    trainer = async_trainer(model, tmp_path / "out", sync, url=server.url, max_steps=5, weight_sync_steps=2)
    at: dict[int, oracle.Bits] = {}
    oracle.after_sync(trainer, lambda step, live: at.update({step: oracle.served_bits(live)}))
    trainer.train()
    assert oracle.same(oracle.pulled(stream, 1, tmp_path / "pulled-1", model), at[2])
    assert oracle.same(oracle.pulled(stream, 2, tmp_path / "pulled-2", model), at[4])
    assert oracle.weight_version(server) == "2"
    assert sync.last is not None
    assert sync.last.version == 2
    assert sync.last.published is not None
    assert sync.last.published.num_steps == 2
    assert "delta v2 (step 4)" in str(sync.last)
    # The fifth step is in no synchronisation, and the stream has it all the same.
    assert oracle.same(oracle.pulled(stream, 3, tmp_path / "pulled-3", model), at[5])


def test_the_wrong_base_is_refused(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    other = tmp_path / "other"
    loaded = load_file(model / "model.safetensors")
    loaded["model.norm.weight"] = loaded["model.norm.weight"] + 1
    other.mkdir()
    save_file(loaded, other / "model.safetensors")
    (other / "config.json").write_text((model / "config.json").read_text())
    trainer = async_trainer(model, tmp_path / "out", DeltaSync(stream, base=other), url=server.url)
    before = oracle.greedy(server)
    with pytest.raises(BaseMismatch, match="norm"):
        trainer.train()
    assert oracle.greedy(server) == before
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks  # nothing is left behind


def test_no_server_when_training_begins(model: Path, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer
    from tests.vllm.servers import free_port
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    url = f"http://127.0.0.1:{free_port()}"
    sync = DeltaSync(stream, base=model, fleet=FleetConfig(status_timeout_s=1.0))
    trainer = async_trainer(model, tmp_path / "out", sync, url=url)
    with pytest.raises(TorchDeltaError, match=url):
        trainer.train()
    assert trainer.state.global_step == 0
    assert sync.publisher is None
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


def test_a_transfer_without_its_callback_is_refused(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    trainer = async_trainer(model, tmp_path / "out", DeltaSync(stream, base=model), url=server.url)
    trainer.callback_handler.callbacks.pop(0)
    with pytest.raises(TorchDeltaError, match=r"DeltaSync\.wire"):
        trainer.train()


def test_training_goes_on_from_its_checkpoint(
    model: Path, server: Server, stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own state of the rollouts beside the checkpoint is written and read as without us."""
    import json

    from trl.experimental.async_grpo import async_grpo_trainer

    from tests.trl.trainers import MadeUpRollouts, async_trainer
    from torch_delta_trl import DeltaSync

    # TRL keeps this state for its own worker, which is known by its class.
    monkeypatch.setattr(async_grpo_trainer, "AsyncRolloutWorker", MadeUpRollouts)

    def build(**options: Any) -> Any:
        sync = DeltaSync(stream, base=model)
        return async_trainer(
            model, tmp_path / "out", sync, url=server.url, save_strategy="steps", save_steps=2, **options
        )

    first = build(max_steps=2)
    first.train()
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "rollout_state.json").read_text())
    assert state["model_version"] == first.model_version == 3
    again = build(max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert again.rollout_worker._loop_kwargs["dataset_start_index"] == state["prompt_index"]
    assert again.rollout_worker.versions == [3, 4, 5, 6]  # TRL's, which goes on too, with a cold one more
    assert again.delta_sync.last.version == 4  # ours
    assert oracle.same(oracle.pulled(stream, 4, tmp_path / "pulled", model), weights(again))
    assert oracle.weight_version(server) == "4"
