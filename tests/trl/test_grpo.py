"""GRPOTrainer against a server: synchronises when it generates, over the stream, without a group of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.trl import oracle

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Watch:
    """After each synchronisation: the trainer's weights, what the server says it has, and what it generates."""

    def __init__(self, trainer: Any, server: Server) -> None:
        self.seen: list[tuple[int, int, oracle.Bits, str, list[list[int]]]] = []
        generation = trainer.vllm_generation
        inner = generation.sync_weights

        def sync_weights() -> None:
            inner()
            model = trainer.accelerator.unwrap_model(trainer.model)
            version = trainer.delta_sync.last.version
            step = trainer.state.global_step
            bits = oracle.served_bits(model)
            self.seen.append((step, version, bits, oracle.weight_version(server), oracle.greedy(server)))

        generation.sync_weights = sync_weights


def test_every_generation_is_by_the_trainers_weights(
    model: Path, server: Server, stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.generation.vllm_client import VLLMClient

    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    def open_group(*_: object, **__: object) -> None:
        raise AssertionError("a group for weights was opened")

    monkeypatch.setattr(VLLMClient, "init_communicator", open_group)
    trainer = grpo_trainer(
        model, tmp_path / "out", DeltaSync(stream, base=model), vllm_server_base_url=server.url, max_steps=3
    )
    assert VLLMClient.init_communicator is open_group  # as it was, for whoever builds the next trainer
    watch = Watch(trainer, server)
    trainer.train()

    assert [(step, version) for step, version, *_ in watch.seen] == [(0, 0), (1, 1), (2, 2)]
    for step, version, bits, said_version, said in watch.seen[1:]:  # the first: see the test below
        assert said_version == str(version)
        assert oracle.same(oracle.pulled(stream, version, tmp_path / f"pulled-{step}", model), bits), f"step {step}"
        fresh = oracle.fresh_greedy(oracle.write_served(model, tmp_path / f"fresh-{step}", bits))
        assert said == fresh, f"step {step}"
    # The last step is published when training ends, though nobody generates with it any more.
    last = oracle.served_bits(trainer.accelerator.unwrap_model(trainer.model))
    assert oracle.same(oracle.pulled(stream, 3, tmp_path / "pulled-last", model), last)
    rows = [row for row in trainer.state.log_history if "delta/changed_fraction" in row]
    assert [row["delta/version"] for row in rows] == [1, 2]


def test_a_run_of_its_own_begins_at_the_base(model: Path, server: Server, shared: Path, tmp_path: Path) -> None:
    """The server served another run before, and is brought back to the base before anybody generates."""
    from tests.trl.trainers import async_trainer, grpo_trainer
    from torch_delta_trl import DeltaSync

    before = DeltaSync(shared / tmp_path.name / "before", base=model)
    async_trainer(model, tmp_path / "before", before, url=server.url, max_steps=1).train()
    sync = DeltaSync(shared / tmp_path.name / "now", base=model)
    trainer = grpo_trainer(model, tmp_path / "out", sync, vllm_server_base_url=server.url, max_steps=1)
    watch = Watch(trainer, server)
    trainer.train()
    assert watch.seen[0][-1] == oracle.fresh_greedy(model)


def test_several_steps_are_one_version(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    """Two batches of every generation: the second step trains without synchronising."""
    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    trainer = grpo_trainer(
        model,
        tmp_path / "out",
        DeltaSync(stream, base=model),
        vllm_server_base_url=server.url,
        max_steps=4,
        steps_per_generation=2,
    )
    watch = Watch(trainer, server)
    trainer.train()
    assert [(step, version) for step, version, *_ in watch.seen] == [(0, 0), (2, 1)]
    _, _, bits, said_version, _ = watch.seen[-1]
    assert said_version == "1"
    assert oracle.same(oracle.pulled(stream, 1, tmp_path / "pulled", model), bits)
    published = trainer.delta_sync.last.published
    assert published.num_steps == 2


def test_evaluation_before_training_says_what_is_missing(
    model: Path, server: Server, stream: Path, tmp_path: Path
) -> None:
    from grpo.reward import prompts
    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    trainer = grpo_trainer(model, tmp_path / "out", DeltaSync(stream, base=model), vllm_server_base_url=server.url)
    with pytest.raises(ValueError, match=r"call train\(\)"):
        trainer.evaluate(prompts(8))
