"""Accelerate on ranks without accelerators, for processes of `tests._dist` only."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def shard_on_cpus() -> None:
    """Have Accelerate do FSDP where it is asked to.

    It asks for an accelerator first, and without one forgets the plugin without a word: the model is then replicated.
    FSDP2 itself does without. Whoever calls this asserts `is_sharded` of the model that comes out.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def is_sharded(model: Any) -> bool:
    """Whether every parameter is a DTensor, and this rank holds a part of them only."""
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    if not parameters or not all(isinstance(parameter, DTensor) for parameter in parameters):
        return False
    return sum(one.to_local().numel() for one in parameters) < sum(one.numel() for one in parameters)
