"""LoRA: what is served is the merged weights, bit for bit, and training goes on from the base as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.trl import oracle
from tests.trl.trainers import TARGETS, adapter
from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def base_bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_parameters() if "lora_" not in name}


class Watch:
    """At the end of each step: what PEFT merges, the base, and what the server says."""

    def __init__(self, trainer: Any, server: Server) -> None:
        self.served: dict[int, tuple[oracle.Bits, list[list[int]]]] = {}
        self.trainer, self.server = trainer, server
        self.base = base_bits(self.model)

    @property
    def model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def see(self, version: int) -> None:
        self.served[version] = oracle.merged_bits(self.model), oracle.greedy(self.server)

    def check(self, model: Path, stream: Path, folder: Path) -> None:
        for version, (bits, said) in self.served.items():
            assert oracle.same(oracle.pulled(stream, version, folder / f"pulled-{version}", model), bits), version
            assert said == oracle.fresh_greedy(oracle.write_served(model, folder / f"fresh-{version}", bits)), version
        every = [bits for bits, _ in self.served.values()]
        for name, values in every[0].items():
            moved = any((one[name] != values).any() for one in every[1:])
            assert moved == any(target in name for target in TARGETS), name
        now = base_bits(self.model)
        assert all(torch.equal(now[name], value) for name, value in self.base.items())


@pytest.mark.slow
def test_async_grpo_serves_merged_weights(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync

    sync = DeltaSync(stream, base=model)
    trainer = async_trainer(
        model, tmp_path / "out", sync, url=server.url, adapter=adapter(), learning_rate=1e-2, logging_steps=1
    )
    watch = Watch(trainer, server)
    oracle.after_sync(trainer, lambda step, _: watch.see(step))
    trainer.train()
    assert sorted(watch.served) == [1, 2, 3]
    watch.check(model, stream, tmp_path)
    assert oracle.weight_version(server) == "3"
    rows = [row for row in trainer.state.log_history if "delta/changed_fraction" in row]
    assert all(0 < row["delta/changed_fraction"] < 0.5 for row in rows)
    assert watch.model.merge_adapter.__name__ == "merge_adapter"  # TRL's merging is put off during its own turn alone


@pytest.mark.slow
def test_grpo_serves_merged_weights(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    trainer = grpo_trainer(
        model,
        tmp_path / "out",
        DeltaSync(stream, base=model),
        vllm_server_base_url=server.url,
        max_steps=4,
        learning_rate=1e-2,
        adapter=adapter(),
    )
    watch = Watch(trainer, server)
    inner = trainer.vllm_generation.sync_weights

    def sync_weights() -> None:
        inner()
        if trainer.delta_sync.last.version:
            watch.see(trainer.delta_sync.last.version)

    trainer.vllm_generation.sync_weights = sync_weights
    trainer.train()
    assert sorted(watch.served) == [1, 2, 3]
    watch.check(model, stream, tmp_path)


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_serve_merged_weights(model: Path, server: Server, stream: Path, tmp_path: Path) -> None:
    """DDP: each rank publishes its share of the tensors."""
    import numpy as np

    from tests._dist import run_ranks
    from tests.trl.ranks import train

    where = {"model": str(model), "out": str(tmp_path), "stream": str(stream), "url": server.url}
    ranks = run_ranks(train, 2, timeout_s=240.0, sharded=False, adapted=True, **where)
    assert [rank["error"] for rank in ranks] == [None, None]
    assert [rank["steps"] for rank in ranks] == [[1, 2, 3]] * 2
    for step in (1, 2, 3):
        with np.load(tmp_path / f"at-{step}.npz") as found:
            bits = dict(found)
        assert oracle.same(oracle.pulled(stream, step, tmp_path / f"pulled-{step}", model), bits), f"step {step}"
    assert oracle.greedy(server) == ranks[0]["greedy"][-1]
    assert oracle.weight_version(server) == "3"


def test_merging_of_a_merged_model_is_refused(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from torch_delta.publish.base import open_base
    from torch_delta_trl.adapters import merged

    adapted = wrapped(AutoModelForCausalLM.from_pretrained(model), adapter())
    schema = open_base(str(model)).schema
    names = [name for name, _ in merged(adapted, schema)]
    assert sorted(names) == sorted(spec.name for spec in schema.tensors)
    adapted.merge_adapter()
    with pytest.raises(CaptureError, match="unmerge it before"):
        list(merged(adapted, schema))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"use_dora": True}, "plain LoRA"),
        ({"target_modules": ["embed_tokens"]}, "plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
    ],
)
def test_what_is_not_base_plus_product_is_refused(options: dict[str, Any], says: str, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from torch_delta_trl.contract import refuse_what_cannot_be_exact

    adapted = wrapped(AutoModelForCausalLM.from_pretrained(model), adapter(**options))
    with pytest.raises(CaptureError, match=rf"{says}.*enable-lora"):
        refuse_what_cannot_be_exact(trainer_of(adapted))


def test_other_adapters_and_several_are_refused(model: Path) -> None:
    from peft import IA3Config
    from transformers import AutoModelForCausalLM

    from torch_delta_trl.contract import refuse_what_cannot_be_exact

    plain = AutoModelForCausalLM.from_pretrained(model)
    scaling = IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    with pytest.raises(CaptureError, match="exactly one LoRA"):
        refuse_what_cannot_be_exact(trainer_of(wrapped(plain, scaling)))
    two = wrapped(AutoModelForCausalLM.from_pretrained(model), adapter())
    two.add_adapter("second", adapter())
    two.base_model.set_adapter(["default", "second"])
    with pytest.raises(CaptureError, match="default, second"):
        refuse_what_cannot_be_exact(trainer_of(two))


def test_tied_weights_with_an_adapter_are_refused(model: Path) -> None:
    """The head would part from the embeddings, and the server has one tensor for both."""
    from transformers import AutoModelForCausalLM

    from torch_delta_trl.contract import refuse_what_cannot_be_exact

    tied = AutoModelForCausalLM.from_pretrained(model)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(CaptureError, match="lm_head shares its weight"):
        refuse_what_cannot_be_exact(trainer_of(wrapped(tied, adapter(target_modules=["lm_head"]))))


def test_a_sharded_adapted_model_is_refused(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    from torch_delta_trl.contract import refuse_what_cannot_be_exact

    adapted = wrapped(AutoModelForCausalLM.from_pretrained(model), adapter())
    refuse_what_cannot_be_exact(trainer_of(adapted))
    with pytest.raises(CaptureError, match="FSDP shards it"):
        refuse_what_cannot_be_exact(trainer_of(adapted, fsdp_plugin=SimpleNamespace(fsdp_version=2)))


@pytest.mark.parametrize("kind", ["async", "grpo"])
@pytest.mark.slow
def test_a_trainer_refuses_before_anything_is_published(
    kind: str, model: Path, server: Server, stream: Path, tmp_path: Path
) -> None:
    from tests.trl.trainers import async_trainer, grpo_trainer
    from torch_delta_trl import DeltaSync

    dora = adapter(use_dora=True)
    sync = DeltaSync(stream, base=model)
    build, where = (async_trainer, "url") if kind == "async" else (grpo_trainer, "vllm_server_base_url")
    with pytest.raises(CaptureError, match="plain LoRA"):
        build(model, tmp_path / "out", sync, adapter=dora, **{where: server.url})
    assert not stream.exists()


def wrapped(model: Any, config: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(model, config)


def trainer_of(model: object, **state: object) -> Any:
    return SimpleNamespace(
        model=model, accelerator=SimpleNamespace(unwrap_model=lambda one: one, state=SimpleNamespace(**state))
    )
