"""LoRA: the merged weights are published, from a persistent snapshot of what is served.

Merging in place and unmerging again does not give the base back bit for bit, so nothing is merged in place: at each
publish the weights are walked through, with the adapter's product added to a copy, and compared with what was published
before. What the servers get is what `merge_and_unload` would make of the model at that moment; they know of no adapter.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.tensorsource import TensorSource
from torch_delta.errors import CaptureError
from torch_delta.publish.base import open_base

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.format.schema import Schema

_INSTEAD = (
    "Train the full weights, or let TRL synchronise the adapter itself (AsyncGRPOTrainer does, with a server started "
    "with --enable-lora)"
)


def is_adapted(model: Any) -> bool:
    """Whether the model has PEFT adapters."""
    return hasattr(model, "peft_config")


def refuse_unmergeable(model: Any) -> None:
    """Adapters whose merged weights are not base plus product.

    Args:
        model: a PeftModel.

    Raises:
        CaptureError: says which and what to do.
    """
    from peft import LoraConfig
    from peft.tuners import lora
    from peft.tuners.tuners_utils import BaseTunerLayer

    active = list(model.active_adapters)
    if len(active) != 1 or not isinstance(model.peft_config[active[0]], LoraConfig):
        raise _refused(f"active are {', '.join(active) or 'none'}; exactly one LoRA adapter can be merged exactly")
    chosen = model.peft_config[active[0]]
    if chosen.modules_to_save or chosen.bias != "none":
        raise _refused(
            f"modules_to_save={chosen.modules_to_save}, bias={chosen.bias!r}: it trains more than the product of two "
            "matrices"
        )
    names: dict[int, list[str]] = {}
    base = model.get_base_model()
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in base.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        plain = type(layer) is lora.Linear and not layer.lora_variant and not any(layer.lora_bias.values())
        if not plain:
            raise _refused(
                f"{name} is a {type(layer).__name__}; only plain LoRA of Linear layers can be merged exactly"
            )
        shared = names[id(layer.get_base_layer().weight)]
        if len(shared) > 1:
            raise _refused(f"{name} shares its weight ({', '.join(shared)}); the server has one tensor for both")


def merged_source(model: Any, base: str, capture: CaptureConfig | None) -> TensorSource:
    """The model's weights with its adapter in them, as a source of changes. Each rank holds the whole model.

    Args:
        model: a PeftModel that `refuse_unmergeable` let pass.
        base: checkpoint; its names and dtypes are published.
        capture: only its placement is used.

    Raises:
        CaptureError: names are to be left out, or model and base do not hold the same tensors.
    """
    chosen = capture if capture is not None else CaptureConfig()
    if chosen.exclude or chosen.constant:
        raise CaptureError("CaptureConfig: exclude and constant cannot be had together with PEFT adapters")
    schema = open_base(base).schema
    return TensorSource(lambda: merged(model, schema), schema, placement=chosen.placement)


@torch.no_grad()
def merged(model: Any, schema: Schema) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the base under its checkpoint name, those with an adapter as a merged copy.

    Args:
        model: see `merged_source`.
        schema: of two names of one weight, those that are in it are given.

    Raises:
        CaptureError: somebody has merged the adapter in place.
    """
    base, adapter = model.get_base_model(), model.active_adapters[0]
    given: set[int] = set()
    for inner, parameter in base.named_parameters(remove_duplicate=False):
        owner, is_adapted_layer, leaf = inner.rpartition(".base_layer.")
        if not is_adapted_layer and model.prefix in inner:
            continue  # the adapter's own
        name = f"{owner}.{leaf}" if is_adapted_layer else inner
        if id(parameter) in given and name not in schema.by_name:
            continue
        given.add(id(parameter))
        weight = parameter.detach()
        if is_adapted_layer and leaf == "weight":
            layer = base.get_submodule(owner)
            if layer.merged:
                raise CaptureError(
                    f"{owner}: its adapter is merged into the weights now; unmerge it before the next synchronisation"
                )
            weight = (weight + layer.get_delta_weight(adapter)).to(weight.dtype)
        yield name, weight


def keep_unmerged(trainer: Any) -> None:
    """AsyncGRPOTrainer merges around its own transfer, which has nothing to send; each time the base would drift."""
    inner = trainer._sync_weight_merged

    def sync_weight_merged(started_s: float) -> Any:
        with _nothing_merges(trainer.accelerator.unwrap_model(trainer.model)):
            return inner(started_s)

    trainer._sync_weight_merged = sync_weight_merged


@contextlib.contextmanager
def _nothing_merges(model: Any) -> Iterator[None]:
    model.merge_adapter = model.unmerge_adapter = lambda *_, **__: None
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


def _refused(why: str) -> CaptureError:
    return CaptureError(
        f"the model has PEFT adapters whose merged weights cannot be published exactly: {why}. {_INSTEAD}"
    )
