"""Checkpoint tensors as strided views of the model's tensors.

transformers 5 keeps some weights in another layout than its checkpoints (all experts of a MoE layer in one tensor).
Its own `revert_weight_conversion`, run on meta tensors one parameter at a time, says where each checkpoint tensor lies
inside the parameter: a storage offset and strides, at no memory. A conversion that is not a view (it adds, casts,
concatenates or permutes by copy) leaves the parameter's storage and is reported, never guessed. Every other model is
its own checkpoint layout.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from torch_delta.capture.names import as_transformers_model
from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from torch_delta.capture.names import ModelTensor

_logger = logging.getLogger("torch_delta")


@dataclass(frozen=True, slots=True)
class View:
    """A checkpoint tensor inside one model tensor: element (i, j, ..) is `full.flatten()[offset + i*s0 + j*s1 ..]`."""

    source: str
    """Canonical name of the model tensor."""
    shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    offset: int
    """In elements of the full, row-major model tensor."""
    strides: tuple[int, ...]
    """In elements, one per dim of the checkpoint tensor."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every checkpoint tensor of this rank's model lies."""

    views: Mapping[str, View]
    """By checkpoint name."""
    aliases: Mapping[str, str]
    """Checkpoint names of tied weights -> the name of the same view in `views`."""
    unmapped: Mapping[str, str]
    """Canonical model names without a view -> the reason."""


def checkpoint_layout(model: nn.Module, tensors: Iterable[ModelTensor]) -> Layout:
    """Find every checkpoint tensor the model's tensors make up. Reads shapes only.

    Args:
        model: the live model, wrapped or not.
        tensors: what `names.model_tensors` found in it.
    """
    inner = as_transformers_model(model)
    views: dict[str, View] = {}
    aliases: dict[str, str] = {}
    unmapped: dict[str, str] = {}
    for item in tensors:
        shape = tuple(item.tensor.shape)
        found, reason = _views_of(inner, item.name, shape)
        if reason:
            unmapped[item.name] = reason
            continue
        for name, view in found.items():
            if name in views:
                raise CaptureError(
                    f"checkpoint tensor {name!r} would come from both {views[name].source!r} and {item.name!r}",
                    tensor=name,
                )
            views[name] = view
        for alias in item.aliases:
            tied, _ = _views_of(inner, alias, shape)
            for other, view in tied.items():
                match = next((n for n, v in found.items() if v.offset == view.offset and v.strides == view.strides), "")
                if match and other != match:
                    aliases[other] = match
    return Layout(views, {a: n for a, n in aliases.items() if a not in views}, unmapped)


def _views_of(inner: Any, name: str, shape: tuple[int, ...]) -> tuple[dict[str, View], str]:
    """Checkpoint tensors inside one model tensor, or the reason why there are none."""
    meta = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    if inner is None:
        return {name: View(name, shape, 0, meta.stride())}, ""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with _KeepViews():
            converted: dict[str, Any] = revert_weight_conversion(inner, {name: meta})
    except Exception as error:  # third-party conversion code may fail in any way on a lone tensor
        _logger.debug("no checkpoint layout for %s", name, exc_info=True)
        return {}, f"transformers could not revert its layout ({type(error).__name__}: {error})"
    found: dict[str, View] = {}
    for target, tensor in converted.items():
        if tensor.untyped_storage()._cdata != meta.untyped_storage()._cdata:
            return {}, f"checkpoint tensor {target!r} is computed from it, not a view of it"
        found[target] = View(name, tuple(tensor.shape), int(tensor.storage_offset()), tuple(tensor.stride()))
    covered = sum(prod(view.shape) for view in found.values())
    if covered != prod(shape):
        return {}, f"its checkpoint tensors cover {covered} of its {prod(shape)} elements"
    return found, ""


class _KeepViews(TorchFunctionMode):
    """Makes `contiguous()` the identity, so that a conversion stays a view as long as it only moves elements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))
