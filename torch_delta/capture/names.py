"""The model's tensors under canonical names, ties resolved.

Wrappers leave their marks in parameter names (`torch.compile`, activation checkpointing, FSDP1, DDP). They are taken
off here, once, so that everything else sees the names the unwrapped model would have. Two tensors that end up with one
name are refused; one tensor with several names (tied weights) is kept once, with the other names beside it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WRAPPER_ATTRIBUTES = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensor:
    """One parameter or buffer of the model on this rank."""

    name: str
    """Canonical name, the first in the model's own order."""
    aliases: tuple[str, ...]
    """Further canonical names of the very same tensor object (tied weights)."""
    tensor: torch.Tensor
    """The live object: a plain tensor or a DTensor."""
    trainable: bool
    """A parameter that requires gradients."""
    is_buffer: bool
    is_persistent: bool
    """False only for buffers that a state dict leaves out."""
    home: tuple[nn.Module, str]
    """The module that holds it, and the attribute: assigning to that puts another object in its place."""


def canonical_name(name: str, *, is_wrapped: bool = True) -> str:
    """Take wrapper segments off a dotted name: `module.` in front, compile, checkpoint and FSDP1 segments anywhere.

    Args:
        name: as the outermost module has it.
        is_wrapped: whether a `module.` in front is a wrapper's; False where the model itself has a submodule called so.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPER_SEGMENTS]
    return ".".join(parts[1:] if is_wrapped and len(parts) > 1 and parts[0] == "module" else parts)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The innermost model under DDP, `torch.compile` and whole-model checkpoint wrappers.

    A wrapper is a module whose only child sits under a wrapper attribute; a model that merely has a submodule called
    `module` next to others is left alone.
    """
    while (inner := _inside(model)) is not None:
        _, model = inner
    return model


def _is_under_module(model: nn.Module) -> bool:
    """Whether one of the wrappers `unwrap_model` takes off (DDP) holds the model as `module`."""
    while (inner := _inside(model)) is not None:
        attribute, model = inner
        if attribute == "module":
            return True
    return False


def _inside(model: nn.Module) -> tuple[str, nn.Module] | None:
    """What a wrapper wraps, and the attribute it sits under; None if `model` is no wrapper."""
    children = dict(model.named_children())
    ((attribute, child),) = children.items() if len(children) == 1 else (("", model),)
    return (attribute, child) if attribute in _WRAPPER_ATTRIBUTES else None


def as_transformers_model(model: nn.Module) -> nn.Module | None:
    """The transformers model inside `model`, or None; never imports transformers (a live model has already)."""
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return None
    inner = unwrap_model(model)
    return inner if isinstance(inner, module.PreTrainedModel) else None


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """All parameters and buffers, each object once, in the model's own order.

    Raises:
        CaptureError: two different tensors share a canonical name.
    """
    owner_of: dict[str, int] = {}
    names_of: dict[int, list[str]] = {}
    first: dict[int, tuple[torch.Tensor, bool, bool, tuple[nn.Module, str]]] = {}
    is_wrapped = _is_under_module(model)
    for raw, tensor, is_buffer, is_persistent, home in _walk(model):
        name = canonical_name(raw, is_wrapped=is_wrapped)
        holder = owner_of.setdefault(name, id(tensor))
        if holder != id(tensor):
            raise CaptureError(
                f"two different tensors of the model are both called {name!r} once wrapper prefixes are removed "
                f"(the second is {raw!r}); rename one of the modules",
                tensor=name,
            )
        first.setdefault(id(tensor), (tensor, is_buffer, is_persistent, home))
        known = names_of.setdefault(id(tensor), [])
        if name not in known:
            known.append(name)
    return [
        ModelTensor(
            name=names[0],
            aliases=tuple(names[1:]),
            tensor=first[key][0],
            trainable=not first[key][1] and first[key][0].requires_grad,
            is_buffer=first[key][1],
            is_persistent=first[key][2],
            home=first[key][3],
        )
        for key, names in names_of.items()
    ]


def _walk(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool, bool, tuple[nn.Module, str]]]:
    """Yields (raw name, tensor, is_buffer, is_persistent, home); parameters first."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter, False, True, (module, name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer, True, name not in transient, (module, name)
