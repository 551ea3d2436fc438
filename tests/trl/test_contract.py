"""What of TRL the integration relies on, held against the TRL that is installed: each test names what broke.

`torch_delta_trl.contract` looks for the names when a trainer is wired; here are signatures, order and behaviour.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torch_delta.errors import CaptureError, TorchDeltaError, UnsupportedFormat

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def bare(cls: type, **attributes: Any) -> Any:
    """An object of a class without its constructor."""
    made = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


# -- AsyncGRPOTrainer --------------------------------------------------------------------------------------------------


def test_the_transfer_protocol() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    from torch_delta_trl.async_grpo import SyncedTransfer

    theirs = {name for name, value in vars(WeightTransferProtocol).items() if inspect.isfunction(value)}
    wanted = {name for name in theirs if not name.startswith("_")}
    assert wanted == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    for name in wanted:
        ours, theirs_ = getattr(SyncedTransfer, name), getattr(WeightTransferProtocol, name)
        assert parameters(ours) == parameters(theirs_), name


def test_the_async_trainers_arguments() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    assert {"args", "callbacks", "rollout_worker", "weight_transfer"} <= set(parameters(AsyncGRPOTrainer.__init__))
    assert {"weight_sync_steps", "vllm_server_base_url", "max_staleness"} <= set(parameters(AsyncGRPOConfig))


class Recorder:
    """A weight transfer, a rollout worker and an accelerator that write down what is asked of them."""

    def __init__(self, *, is_main_process: bool) -> None:
        self.log: list[str] = []
        self.is_main_process = is_main_process
        for name in ("pause", "resume", "init_weight_transfer", "start"):
            setattr(self, name, lambda name=name: self.log.append(name))

    def wait_for_everyone(self) -> None:
        self.log.append("barrier")

    def send_weights(self, iterator: Any) -> None:
        self.log.append(f"send {len(list(iterator))}")

    def update_model_version(self, version: int) -> None:
        self.log.append(f"version {version}")

    def unwrap_model(self, model: Any) -> Any:
        return model


class Adapted(torch.nn.Module):
    """A model that writes down when its adapter is merged."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.merge_adapter = lambda: log.append("merge_adapter")
        self.unmerge_adapter = lambda: log.append("unmerge_adapter")


def synchronise(*, is_main_process: bool) -> tuple[list[str], Any]:
    """TRL's own synchronisation over two stand-in parameters."""
    from collections import defaultdict

    from trl.experimental.async_grpo import AsyncGRPOTrainer

    recorder = Recorder(is_main_process=is_main_process)

    def two() -> Any:
        recorder.log.append("gather")
        yield "a", None
        recorder.log.append("gather")
        yield "b", None

    trainer = bare(
        AsyncGRPOTrainer,
        accelerator=recorder,
        model=Adapted(recorder.log),
        model_version=4,
        weight_transfer=recorder if is_main_process else None,
        rollout_worker=recorder if is_main_process else None,
        _lora_sync=False,
        _metrics={"train": defaultdict(list)},
        _streaming_iter=two,
    )
    trainer._sync_weight()
    return recorder.log, trainer


def test_the_order_on_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.logger", SimpleNamespace(info=lambda _: None))
    log, trainer = synchronise(is_main_process=True)
    assert log == ["pause", "barrier", "gather", "gather", "send 2", "barrier", "resume", "version 5"]
    assert trainer.model_version == 5
    assert {"perf/weight_sync_s", "perf/weight_sync_pause_s"} <= set(trainer._metrics["train"])


def test_adapters_are_merged_around_the_transfer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `adapters.keep_unmerged` puts off; merging anywhere else would go unnoticed."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer

    source = inspect.getsource(AsyncGRPOTrainer)
    assert source.count("model.merge_adapter()") == source.count("model.unmerge_adapter()") == 1
    assert "self._sync_weight_merged(t0)" in inspect.getsource(AsyncGRPOTrainer._sync_weight)
    assert parameters(AsyncGRPOTrainer._sync_weight_merged) == ["self", "t0"]
    monkeypatch.setattr(async_grpo_trainer, "logger", SimpleNamespace(info=lambda _: None))
    monkeypatch.setattr(async_grpo_trainer, "is_peft_model", lambda _: True)
    log, _ = synchronise(is_main_process=True)
    assert log[2:7] == ["merge_adapter", "gather", "gather", "send 2", "unmerge_adapter"]


def test_other_ranks_drain_the_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why it must be empty on all of them: each item is a collective."""
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.logger", SimpleNamespace(info=lambda _: None))
    log, trainer = synchronise(is_main_process=False)
    assert log == ["barrier", "gather", "gather", "barrier"]
    assert trainer.model_version == 4


def test_the_cold_synchronisation_comes_before_the_rollouts() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import _TrainBeginCallback

    recorder = Recorder(is_main_process=True)
    trainer = SimpleNamespace(
        accelerator=recorder,
        weight_transfer=recorder,
        rollout_worker=recorder,
        _sync_weight=lambda: recorder.log.append("sync"),
    )
    _TrainBeginCallback(trainer).on_train_begin(None, None, None)
    assert recorder.log == ["init_weight_transfer", "sync", "start"]


def test_synchronisations_are_at_multiples_of_the_interval() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import StepIntervalCallback

    from torch_delta_trl.async_grpo import _StepCallback

    theirs: list[int] = []
    ours: list[int] = []
    state = SimpleNamespace(global_step=0)
    their_callback = StepIntervalCallback(lambda: theirs.append(state.global_step), 3)
    our_callback = _StepCallback(SimpleNamespace(push=lambda: ours.append(state.global_step)))
    for step in range(1, 10):
        state.global_step = step
        our_callback.on_step_end(SimpleNamespace(weight_sync_steps=3), state, None)
        their_callback.on_step_end(None, state, None)
    assert ours == theirs == [3, 6, 9]


def test_a_built_trainer_is_wired_in_front(model: Path, tmp_path: Path) -> None:
    """Our callback comes before all of TRL's, nothing is gathered, and what TRL calls is in place."""
    from tests.trl.trainers import async_trainer
    from torch_delta_trl import DeltaSync
    from torch_delta_trl.async_grpo import SyncedTransfer, _StepCallback

    sync = DeltaSync(tmp_path / "stream", base=model)
    trainer = async_trainer(model, tmp_path / "out", sync, url="http://127.0.0.1:1")
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert isinstance(trainer.callback_handler.callbacks[0], _StepCallback)
    assert names.index("_TrainBeginCallback") < names.index("StepIntervalCallback")
    assert isinstance(trainer.weight_transfer, SyncedTransfer)
    assert list(trainer._streaming_iter()) == []
    sync.wire(trainer)  # again: nothing happens
    assert [type(callback).__name__ for callback in trainer.callback_handler.callbacks] == names
    other = async_trainer(
        model, tmp_path / "other", DeltaSync(tmp_path / "stream-2", base=model), url="http://127.0.0.1:1"
    )
    with pytest.raises(ValueError, match="another trainer"):
        sync.wire(other)
    trainer.weight_transfer.destroy()  # before training: harmless


def test_the_trainer_ends_its_transfer_whatever_happens() -> None:
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    source = inspect.getsource(AsyncGRPOTrainer._inner_training_loop)
    assert "finally:" in source
    assert source.index("finally:") < source.index("self.weight_transfer.destroy()")


# -- GRPOTrainer -------------------------------------------------------------------------------------------------------


def test_what_is_replaced_while_a_grpo_trainer_is_built() -> None:
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient

    from torch_delta_trl.grpo import BACKEND, building

    assert parameters(VLLMClient.init_communicator) == ["self", "device"]
    before = VLLMClient.init_communicator, vllm_generation.LLM
    with building():
        assert VLLMClient.init_communicator(object(), device="cuda:0") is None
        assert vllm_generation.LLM.keywords == {"weight_transfer_config": {"backend": BACKEND}}
    assert before == (VLLMClient.init_communicator, vllm_generation.LLM)

    class Failed(Exception):
        pass

    with pytest.raises(Failed), building():
        raise Failed
    assert before == (VLLMClient.init_communicator, vllm_generation.LLM)


def test_nothing_else_builds_engines_or_groups() -> None:
    """If TRL came to start its engine or its group otherwise, ours would be left out without a word."""
    from trl.generation import vllm_client, vllm_generation
    from trl.trainer import grpo_trainer

    source = inspect.getsource(vllm_generation.VLLMGeneration._init_vllm)
    assert source.count("LLM(\n") == 1
    assert source.count(".init_communicator(") == 1
    assert "LLM(" not in inspect.getsource(grpo_trainer).replace("VLLM", "")
    assert inspect.getsource(vllm_client).count("/init_weight_transfer_engine") == 1
    for mode in ("server", "colocate"):
        assert f'self.mode == "{mode}"' in source


def test_the_group_is_what_sends_weights() -> None:
    """The replaced method is the only caller of the client's transfer."""
    from trl.generation.vllm_generation import VLLMGeneration

    callers = [
        name
        for name, value in vars(VLLMGeneration).items()
        if inspect.isfunction(value) and "update_named_params(" in inspect.getsource(value)
    ]
    assert callers == ["sync_weights"]
    assert parameters(VLLMGeneration.sync_weights) == ["self"]


def test_a_trainer_synchronises_when_the_step_moved() -> None:
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer)
    guard = "self.state.global_step != self._last_loaded_step"
    assert source.count("self.vllm_generation.sync_weights()") == source.count(guard) == 2


def test_sleep_as_trl_has_it() -> None:
    """Asleep when built, awake after a synchronisation, asleep after each generation; each waking synchronises."""
    from trl.generation.vllm_generation import VLLMGeneration

    built = inspect.getsource(VLLMGeneration._init_vllm)
    assert "self._llm_weights_sleeping = self.enable_sleep_mode" in built
    generate = inspect.getsource(VLLMGeneration.generate)
    wakes = generate.index("self._llm_weights_sleeping:")
    synchronises = generate.index("self.sync_weights()")
    takes_caches = generate.index('wake_up(tags=["kv_cache"])')
    sleeps = generate.index("self.llm.sleep(level=2)")
    assert wakes < synchronises < takes_caches < sleeps < generate.index("self._llm_weights_sleeping = True")
    assert 'self.llm.wake_up(tags=["weights"])' in inspect.getsource(VLLMGeneration.sync_weights)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "known"), [("1.15.3", False), ("1.16.0", True), ("1.31.0", True), ("2.0", False)])
def test_releases(release: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_delta_trl import contract

    monkeypatch.setattr(contract, "version", lambda _: release)
    if known:
        contract.check_release()
        return
    with pytest.raises(UnsupportedFormat, match=rf"trl {release} is installed.*>= 1\.16, < 2"):
        contract.check_release()


class AsyncGRPOTrainer:
    """Stands for a TRL in which something has moved."""

    args = SimpleNamespace(weight_sync_steps=1, vllm_server_base_url=None)
    _sync_weight = _metrics = callback_handler = model_version = None


class GRPOTrainer:
    _metrics = callback_handler = _last_loaded_step = None
    use_vllm = True
    vllm_generation = SimpleNamespace(sync_weights=None, mode="colocate", enable_sleep_mode=True, llm=None)


@pytest.mark.parametrize(
    ("trainer", "missing"), [(AsyncGRPOTrainer(), "_streaming_iter"), (GRPOTrainer(), "_llm_weights_sleeping")]
)
def test_a_moved_name_is_refused_by_name(trainer: object, missing: str) -> None:
    from torch_delta_trl.contract import kind_of

    with pytest.raises(UnsupportedFormat, match=rf"has no {missing} any more"):
        kind_of(trainer)


def test_other_trainers_are_refused() -> None:
    from torch_delta_trl.contract import kind_of

    with pytest.raises(CaptureError, match=r"object is neither.*torch_delta\.attach"):
        kind_of(object())
    without = GRPOTrainer()
    without.use_vllm = False
    with pytest.raises(CaptureError, match="use_vllm=True"):
        kind_of(without)


def trainer_of(model: object, **accelerator: object) -> Any:
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda one: one, state=SimpleNamespace(**accelerator)),
    )


def test_shardings_that_cannot_be_followed_are_refused() -> None:
    from torch_delta_trl.contract import refuse_what_cannot_be_exact

    with pytest.raises(CaptureError, match="fsdp_version: 2"):
        refuse_what_cannot_be_exact(trainer_of(object(), fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    deepspeed = trainer_of(object(), fsdp_plugin=None)
    deepspeed.is_deepspeed_enabled = True
    with pytest.raises(CaptureError, match="DeepSpeed"):
        refuse_what_cannot_be_exact(deepspeed)
    refuse_what_cannot_be_exact(trainer_of(object(), fsdp_plugin=SimpleNamespace(fsdp_version=2)))


def test_an_open_store_needs_a_url_for_the_engines() -> None:
    from torch_delta.store import MemoryStore
    from torch_delta_trl import DeltaSync

    with MemoryStore() as store:
        with pytest.raises(ValueError, match="server_stream"):
            DeltaSync(store)
        assert DeltaSync(store, server_stream="s3://bucket/run").stream == "s3://bucket/run"


def test_nothing_is_published_before_training_begins() -> None:
    from torch_delta_trl import DeltaSync

    with pytest.raises(ValueError, match=r"before train\(\)"):
        DeltaSync("s3://bucket/run").push()


def test_a_step_without_its_synchronisation_is_noticed() -> None:
    from torch_delta_trl import DeltaSync

    sync = DeltaSync("s3://bucket/run")
    sync._trainer = SimpleNamespace(state=SimpleNamespace(global_step=3))
    with pytest.raises(TorchDeltaError, match=r"at step 3, DeltaSync last did at None.*DeltaSync\.wire"):
        sync.check_synced()
