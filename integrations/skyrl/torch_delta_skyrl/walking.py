"""A SkyRL weight source as a walk over a checkpoint's tensors: SkyRL's names, cast to the checkpoint's dtypes.

As SkyRL's own publisher does, tensors of the checkpoint that the source does not yield stay as they are, and a head
that is tied to the embedding and not in the checkpoint is left out. Unlike it, other tensors that no receiver could
take are refused by name: their changes would reach nobody.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch_delta.capture.arrays import SERVING_DTYPES
from torch_delta.errors import CaptureError
from torch_delta_skyrl.ties import Pairs, is_tied

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from torch_delta.format.schema import Schema
    from torch_delta.publish.base import BaseCheckpoint

_logger = logging.getLogger("torch_delta")
_SHOWN = 8


class Walk:
    """What a `TensorSource` walks. The first walk yields what the stream's newest version holds, later ones the source.

    Args:
        source: SkyRL's `WeightSource`; iterated once per walk, to its end, on every rank that has one.
        base: the checkpoint whose tensors are published.
        reference: a checkpoint with the same tensors, at the newest version of the stream.
        schema: of the stream; which names share a tensor.
    """

    def __init__(
        self,
        source: Iterable[tuple[str, torch.Tensor]],
        base: BaseCheckpoint,
        reference: BaseCheckpoint,
        schema: Schema,
    ) -> None:
        self._source = source
        self._base = base
        self._reference = reference
        self._schema = schema
        self._is_live = False
        self._specs = base.schema.by_name
        self._is_tied = is_tied(base)
        self._told: set[str] = set()

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One walk."""
        is_live, self._is_live = self._is_live, True
        return self._live() if is_live else tensors_of(self._reference, self._names())

    def _names(self) -> list[str]:
        return [self._schema.tensors[index].name for index in self._schema.data_indices]

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        strangers: list[str] = []
        seen: set[str] = set()
        pairs = Pairs(self._schema)
        for name, tensor in self._source:
            spec = self._specs.get(name)
            if spec is None:
                strangers.append(name)
                continue
            for found, cast in pairs.take(name, tensor.to(SERVING_DTYPES[spec.dtype])):
                seen.add(found)
                yield found, cast
        pairs.check()
        lost = [name for name in strangers if not (self._is_tied and name.endswith("lm_head.weight"))]
        if lost or not seen:
            raise CaptureError(
                f"{len(lost)} tensors of the trainer are not in the checkpoint {self._base.name}: "
                f"{', '.join(lost[:_SHOWN])}; no server could take their changes. Serve and train the same checkpoint "
                "(trainer.policy.model.path), with all its tensors under the names the trainer exports",
                tensors=tuple(lost[:100]),
            )
        constant = [name for name in self._names() if name not in seen]
        self._tell(strangers, constant)
        yield from tensors_of(self._reference, constant)

    def _tell(self, left_out: list[str], constant: list[str]) -> None:
        """Once for each set of names, so that a log shows what is not synchronised."""
        for names, what in ((left_out, "tied, and not in the checkpoint"), (constant, "not exported by the trainer")):
            fresh = [name for name in names if name not in self._told]
            if fresh:
                self._told.update(fresh)
                _logger.warning("%d tensors stay as they are (%s): %s", len(fresh), what, ", ".join(fresh[:_SHOWN]))


def tensors_of(checkpoint: BaseCheckpoint, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint folder, mapped: only what is looked at is read."""
    from safetensors import safe_open

    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(checkpoint.files[name], []).append(name)
    for file, inside in by_file.items():
        with safe_open(checkpoint.path / file, framework="pt") as opened:
            for name in inside:
                yield name, opened.get_tensor(name)
