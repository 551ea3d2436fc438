"""vLLM's layerwise reload, fed from the working copy, and never left half way.

vLLM puts all parameters on the meta device, loads each layer into fresh memory, processes it (quantisation, repacking)
and copies the result into the old memory, which captured graphs refer to. A failure in between leaves layers on the
meta device, and the next forward pass ends the server. Here every layer gets real parameters back whatever happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_delta.vllm import versions
from torch_delta.vllm.routing.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np


def reload_layerwise(
    model: torch.nn.Module,
    model_config: Any,
    tensors: Iterable[tuple[str, np.ndarray[Any, Any], str]],
    device: torch.device,
) -> None:
    """Load checkpoint tensors into a live model.

    Args:
        model: to load into; layers for which nothing comes keep what they have.
        model_config: of the engine.
        tensors: name, bits in the tensor's shape, safetensors dtype.
        device: of the model.

    Raises:
        Exception: whatever a loader raises. All parameters are real then, with old or new values.
    """
    layerwise = versions.layerwise()
    load_weights: Any = model.load_weights
    with device:
        layerwise.initialize_layerwise_reload(model)
        try:
            load_weights(_as_torch(tensors, device))
        except BaseException:
            _forget_unfinished(model, layerwise)
            layerwise.finalize_layerwise_reload(model, model_config)
            raise
        layerwise.finalize_layerwise_reload(model, model_config)


def _forget_unfinished(model: torch.nn.Module, layerwise: Any) -> None:
    """Let the end of a reload put the old parameters back into every layer that was not complete."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _as_torch(
    tensors: Iterable[tuple[str, np.ndarray[Any, Any], str]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, bits, dtype in tensors:
        yield name, torch.from_numpy(bits).view(TORCH_DTYPES[dtype]).to(device)
