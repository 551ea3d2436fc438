"""What of TRL this package relies on. A release that changed any of it is refused by name when a trainer is wired.

TRL has no seam for this in GRPOTrainer, and one that covers the main process only in AsyncGRPOTrainer, so that some
private names are used; `tests/trl/test_contract.py` holds their behaviour, this module their presence.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from torch_delta.errors import CaptureError, UnsupportedFormat
from torch_delta_trl.adapters import is_adapted, refuse_unmergeable

if TYPE_CHECKING:
    from collections.abc import Iterable

OLDEST = (1, 16)
BELOW = (2,)

Kind = Literal["async", "grpo"]


def check_release() -> None:
    """Refuse a TRL that this package was not made for.

    Raises:
        UnsupportedFormat: names the release and the range.
    """
    installed = version("trl")
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not numbers >= OLDEST or numbers >= BELOW:
        raise UnsupportedFormat(
            f"trl {installed} is installed; torch_delta_trl works with trl >= 1.16, < 2. Install such a release",
            installed=installed,
        )


def kind_of(trainer: Any) -> Kind:
    """Which of the two trainers it is, and that everything is where this package expects it.

    Raises:
        UnsupportedFormat: this release of TRL moved something; names it.
        CaptureError: another trainer, or one without vLLM.
    """
    check_release()
    names = {cls.__name__ for cls in type(trainer).__mro__}
    if "AsyncGRPOTrainer" in names:
        _need(trainer, ("_streaming_iter", "_sync_weight", "_metrics", "callback_handler", "model_version"))
        _need(trainer.args, ("weight_sync_steps", "vllm_server_base_url"))
        if is_adapted(trainer.accelerator.unwrap_model(trainer.model)):
            _need(trainer, ("_sync_weight_merged",))
        return "async"
    if "GRPOTrainer" in names:
        if not getattr(trainer, "use_vllm", False):
            raise CaptureError(
                "this GRPOTrainer generates with transformers, from the live model: there is nothing to synchronise. "
                "Set use_vllm=True in its GRPOConfig"
            )
        _need(trainer, ("_metrics", "callback_handler", "vllm_generation", "_last_loaded_step"))
        _need(trainer.vllm_generation, ("sync_weights", "mode", "enable_sleep_mode"))
        if trainer.vllm_generation.mode == "colocate":
            _need(trainer.vllm_generation, ("llm", "_llm_weights_sleeping"))
        return "grpo"
    raise CaptureError(
        f"{type(trainer).__name__} is neither TRL's AsyncGRPOTrainer nor its GRPOTrainer; use torch_delta.attach in it "
        "and torch_delta.vllm.Fleet for its servers"
    )


def refuse_what_cannot_be_exact(trainer: Any) -> None:
    """Adapters and shardings whose serving weights this package cannot follow bit for bit.

    Raises:
        CaptureError: says which and what to do.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise CaptureError("DeepSpeed shards parameters where torch_delta cannot see them; use FSDP2 or DDP")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 2) != 2:
        raise CaptureError("FSDP version 1 flattens parameters; set fsdp_version: 2 in the Accelerate configuration")
    if is_adapted(model):
        if plugin is not None:
            raise CaptureError(
                "the model has PEFT adapters and FSDP shards it: merged weights are published from whole tensors only. "
                "Train adapters in one process or with DDP, or the full weights"
            )
        refuse_unmergeable(model)


def _need(owner: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise UnsupportedFormat(
            f"trl {version('trl')}: {type(owner).__name__} has no {', '.join(missing)} any more; this release of "
            "torch_delta_trl does not know it. Upgrade torch-delta, or install trl 1.16",
            missing=missing,
        )
