"""Changes of an FSDP2 model's own shards: what SkyRL's FSDP source would gather, compared where it lies.

SkyRL's seam gives the model and not the optimizer. None is needed: weights are compared with a copy at each send, so
that nothing happens at an optimizer step, and weights moved in any other way (a checkpoint loaded) are seen as well.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from torch_delta.capture import Capture, CaptureConfig
from torch_delta.capture.arrays import SERVING_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from torch_delta.capture.source import Bits, Collected, OwnedBox, Region
    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema


def fsdp_model(source: Any, schema: Schema) -> nn.Module | None:
    """The model behind SkyRL's own FSDP source, if its shards, cast to the checkpoint's dtypes, are what it yields.

    Not where the source puts a prefix before the names, or rounds to another dtype than the checkpoint's on the way.
    """
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

    if type(source) is not FsdpWeightSource or source.weight_prefix:
        return None
    for meta in source.metadata():
        spec = schema.by_name.get(meta.name)
        if spec is not None and SERVING_DTYPES[spec.dtype] != meta.dtype:
            return None
    model: nn.Module = source.model
    return model


def shard_source(model: nn.Module, schema: Schema) -> ShardSource:
    """This rank's shards. A collective.

    Raises:
        CaptureError: this model or its layout cannot be captured; on all ranks.
    """
    held = set(model.state_dict())
    constant = tuple(fnmatch_literal(spec.name) for spec in schema.tensors if spec.name not in held)
    # Never stepped: it only says which parameters there are.
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.0)
    config = CaptureConfig(mode="persistent", constant=constant)
    return ShardSource(Capture(optimizer, model, schema, config=config))


def fnmatch_literal(name: str) -> str:
    """A shell-style pattern that only this name matches."""
    pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
    assert fnmatch.fnmatchcase(name, pattern)
    return pattern


class ShardSource:
    """A capture without optimizer steps: it publishes when it is told to. A `ChangeSource`; see there.

    Args:
        capture: of the model; closed with this.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    @property
    def schema(self) -> Schema:
        """The checkpoint tensors."""
        return self._capture.schema

    @property
    def owned(self) -> Sequence[OwnedBox]:
        """This rank's boxes."""
        return self._capture.owned

    @property
    def constant(self) -> tuple[int, ...]:
        """Tensors of the checkpoint that the model does not hold."""
        return self._capture.constant

    @property
    def wants_ranks(self) -> bool:
        """See `ChangeSource`."""
        return self._capture.wants_ranks

    @wants_ranks.setter
    def wants_ranks(self, wanted: bool) -> None:
        self._capture.wants_ranks = wanted

    def collect(self) -> Collected:
        """Compare every shard with its copy."""
        return self._capture.collect()

    def commit(self, token: int) -> None:
        """The version of `token` exists."""
        self._capture.commit(token)

    def rollback(self, token: int) -> None:
        """The version of `token` does not exist."""
        self._capture.rollback(token)

    def regions(self) -> Iterator[Region]:
        """Bits of every owned box as of the last collect."""
        return self._capture.regions()

    def read(self, tensor: int, box: Box) -> Bits:
        """Bits of a box inside one owned box, as of the last collect."""
        return self._capture.read(tensor, box)

    def digests(self) -> dict[int, Digest]:
        """Of this rank's boxes as of the last collect."""
        return self._capture.digests()

    def close(self) -> None:
        """Free the copies. Idempotent."""
        self._capture.close()
