"""The served model of one worker: what the state machine asks of vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_delta.vllm import versions
from torch_delta.vllm.reload import reload_layerwise
from torch_delta.vllm.routing import LiveModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from torch_delta.format.schema import Schema


class ServedModel:
    """See `records.Model`.

    Args:
        model: of this worker.
        vllm_config: of the engine.
        device: of this worker.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self.holds_served_files = vllm_config.load_config.load_format != "dummy"

    def probe(self, schema: Schema) -> LiveModel:
        """Find the routes; writes nothing."""
        with torch.no_grad(), versions.plain_loading(self._model):
            return LiveModel.probe(self._model, schema, context=lambda: versions.current_config(self._vllm_config))

    def reload(self, tensors: Iterator[tuple[str, np.ndarray[Any, Any], str]]) -> None:
        """Load tensors through the model's own loaders, layer by layer."""
        with torch.no_grad(), versions.current_config(self._vllm_config):
            reload_layerwise(self._model, self._vllm_config.model_config, tensors, self._device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
