"""GRPOTrainer with vLLM in its own process: awake, and with an engine that sleeps while the trainer steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

from tests.trl import oracle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.engines import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def adopt(monkeypatch: pytest.MonkeyPatch, shared: Path) -> Iterator[Any]:
    """`adopt(llm)`: the engine a trainer started, with the means to look into it; ended with the test."""
    from trl.generation import vllm_generation

    from tests.vllm import engines

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them for vLLM; this has them restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_DELTA_CHECKPOINT_ROOT", str(shared / "colocated"))
    monkeypatch.setenv("TORCH_DELTA_ALLOWED_PATHS", str(shared))
    # Not compiled, as the fresh engines they are compared with: two ways of rounding part at a near tie.
    monkeypatch.setattr(vllm_generation, "LLM", functools.partial(vllm_generation.LLM, enforce_eager=True))
    adopted: list[Engine] = []

    def take(llm: Any) -> Engine:
        engine = object.__new__(engines.Engine)
        engine.llm = llm
        engines._living.add(id(engine))
        adopted.append(engine)
        return engine

    yield take
    for engine in adopted:
        engine.close()


class Watch:
    """At each look: step, version, the trainer's weights, the engine's parameters, what it generates."""

    def __init__(self, trainer: Any, engine: Engine) -> None:
        self.seen: list[tuple[int, int, oracle.Bits, Any, list[list[int]]]] = []
        self.trainer, self.engine = trainer, engine

    def after_each_synchronisation(self) -> None:
        generation = self.trainer.vllm_generation
        inner = generation.sync_weights

        def sync_weights() -> None:
            inner()
            self.look()

        generation.sync_weights = sync_weights

    def look(self) -> None:
        trainer = self.trainer
        bits = oracle.served_bits(trainer.accelerator.unwrap_model(trainer.model))
        version = trainer.delta_sync.last.version
        said = oracle.say(self.engine)
        self.seen.append((trainer.state.global_step, version, bits, self.engine.parameters(), said))

    def check(self, model: Path, folder: Path) -> None:
        """Compare all of it with fresh engines."""
        from tests.vllm.engines import differing

        for number, (step, _, bits, parameters, said) in enumerate(self.seen):
            with oracle.fresh_engine(oracle.write_served(model, folder / f"fresh-{number}", bits)) as fresh:
                assert differing(parameters, fresh.parameters()) == [], f"step {step}"
                assert said == oracle.say(fresh), f"step {step}"


def test_every_generation_is_by_the_trainers_weights(model: Path, stream: Path, tmp_path: Path, adopt: Any) -> None:
    from vllm.v1.engine.core import EngineCore

    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    resets = []
    with pytest.MonkeyPatch.context() as patch:
        inner = EngineCore.reset_prefix_cache
        patch.setattr(
            EngineCore, "reset_prefix_cache", lambda self, *args, **kw: resets.append(1) or inner(self, *args, **kw)
        )
        trainer = grpo_trainer(
            model,
            tmp_path / "out",
            DeltaSync(stream, base=model),
            max_steps=5,
            steps_per_generation=2,
            gradient_checkpointing=True,
        )
        engine = adopt(trainer.vllm_generation.llm)
        assert engine.llm.llm_engine.vllm_config.weight_transfer_config.backend == "torch_delta"
        watch = Watch(trainer, engine)
        watch.after_each_synchronisation()
        trainer.train()
    assert [(step, version) for step, version, *_ in watch.seen] == [(0, 0), (2, 1), (4, 2)]
    assert len(resets) == 2  # one per version that came
    watch.check(model, tmp_path)
    assert trainer.delta_sync.last.published.num_steps == 2


def test_an_engine_that_sleeps_gets_all_of_its_weights_each_time(
    model: Path, stream: Path, tmp_path: Path, adopt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2, as TRL has it. Sleep needs CUDA: here the weights are overwritten, and vLLM's worker is told of it.

    The next test is the real thing.
    """
    from trl.generation import vllm_generation

    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    log: list[str] = []
    monkeypatch.setattr(vllm_generation, "LLM", sleepy(vllm_generation.LLM, log, adopt))
    trainer = grpo_trainer(
        model, tmp_path / "out", DeltaSync(stream, base=model), max_steps=3, vllm_enable_sleep_mode=True
    )
    watch = Watch(trainer, trainer.vllm_generation.llm.engine)
    watch.after_each_synchronisation()
    trainer.train()
    assert [(step, version) for step, version, *_ in watch.seen] == [(0, 0), (1, 1), (2, 2)]
    watch.check(model, tmp_path)
    once = ["wake weights", "init", "update 0 reload", "wake kv_cache", "sleep"]
    assert log == [
        "sleep",  # when it was built; nothing is delivered when training begins
        *once,
        *("wake weights", "update 1 reload", "wake kv_cache", "sleep"),
        *("wake weights", "update 2 reload", "wake kv_cache", "sleep"),
    ]


@pytest.mark.gpu
def test_an_engine_that_really_sleeps(model: Path, stream: Path, tmp_path: Path, adopt: Any) -> None:
    """vLLM frees its memory on a GPU only. Looked at when it is about to sleep: before, its caches have no memory."""
    import torch

    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: CPU engines do not sleep")
    trainer = grpo_trainer(
        model,
        tmp_path / "out",
        DeltaSync(stream, base=model),
        max_steps=3,
        vllm_enable_sleep_mode=True,
        use_cpu=False,
    )
    llm = trainer.vllm_generation.llm
    watch = Watch(trainer, adopt(llm))
    inner = llm.sleep

    def sleep(level: int) -> None:
        assert level == 2
        watch.look()
        inner(level=level)

    llm.sleep = sleep
    trainer.train()
    assert [(step, version) for step, version, *_ in watch.seen] == [(0, 0), (1, 1), (2, 2)]
    watch.check(model, tmp_path)


def sleepy(real: Any, log: list[str], adopt: Any) -> Any:
    """A factory of engines that sleep on a CPU: their weights become NaN, and calls that touch them then fail."""
    from torch_delta.vllm import worker as hooks

    class Sleepy:
        def __init__(self, **options: Any) -> None:
            assert options.pop("enable_sleep_mode") is True
            self.llm = real(**options)
            self.engine = adopt(self.llm)
            self.asleep = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.llm, name)

        def sleep(self, level: int) -> None:
            assert level == 2
            log.append("sleep")
            hooks.sleeps(self.engine.worker)
            hooks.weights_lost(self.engine.worker, "the engine slept")
            for parameter in self.engine.model.parameters():
                parameter.data.fill_(float("nan"))
            self.asleep = True

        def wake_up(self, tags: list[str]) -> None:
            log.append(f"wake {tags[0]}")
            if "weights" in tags:
                hooks.replica_of(self.engine.worker).wakes()
                self.asleep = False

        def collective_rpc(self, method: str, args: Any = ()) -> Any:
            assert not self.asleep, f"{method} reached an engine that sleeps"
            if method == "init_weight_transfer_engine":
                log.append("init")
            if method == "update_weights":
                log.append(f"update {args[0]['version']} {args[0]['mode']}")
            return self.llm.collective_rpc(method, args=args)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            assert not self.asleep
            return self.llm.generate(*args, **kwargs)

    return Sleepy
