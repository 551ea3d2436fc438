"""A SkyRL weight source as a walk over a checkpoint's tensors: SkyRL's names, cast to the checkpoint's dtypes.

As SkyRL's own publisher does, tensors of the checkpoint that the source does not yield stay as they are, and a head
that is tied to the embedding and not in the checkpoint is left out. Unlike it, other tensors that no receiver could
take are refused by name: their changes would reach nobody.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from torch_delta.capture.arrays import SERVING_DTYPES
from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from torch_delta.publish.base import BaseCheckpoint

_logger = logging.getLogger("torch_delta")
_SHOWN = 8


class Walk:
    """What a `TensorSource` walks. The first walk yields what the stream's newest version holds, later ones the source.

    Args:
        source: SkyRL's `WeightSource`; iterated once per walk, to its end, on every rank that has one.
        base: the checkpoint whose tensors are published.
        reference: a checkpoint with the same tensors, at the newest version of the stream.
    """

    def __init__(
        self, source: Iterable[tuple[str, torch.Tensor]], base: BaseCheckpoint, reference: BaseCheckpoint
    ) -> None:
        self._source = source
        self._base = base
        self._reference: BaseCheckpoint | None = reference
        self._specs = base.schema.by_name
        self._is_tied = _is_tied(base)
        self._told: set[str] = set()

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One walk."""
        reference, self._reference = self._reference, None
        if reference is not None:
            return tensors_of(reference, [spec.name for spec in self._base.schema.tensors])
        return self._live()

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        strangers: list[str] = []
        seen: set[str] = set()
        for name, tensor in self._source:
            spec = self._specs.get(name)
            if spec is None:
                strangers.append(name)
                continue
            seen.add(name)
            yield name, tensor.to(SERVING_DTYPES[spec.dtype])
        lost = [name for name in strangers if not (self._is_tied and name.endswith("lm_head.weight"))]
        if lost or not seen:
            raise CaptureError(
                f"{len(lost)} tensors of the trainer are not in the checkpoint {self._base.name}: "
                f"{', '.join(lost[:_SHOWN])}; no server could take their changes. Serve and train the same checkpoint "
                "(trainer.policy.model.path), with all its tensors under the names the trainer exports",
                tensors=tuple(lost[:100]),
            )
        constant = [spec.name for spec in self._base.schema.tensors if spec.name not in seen]
        self._tell(strangers, constant)
        yield from tensors_of(self._base, constant)

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


def _is_tied(base: BaseCheckpoint) -> bool:
    path = base.path / "config.json"
    settings: Any = json.loads(path.read_bytes()) if path.is_file() else {}
    text = settings.get("text_config") or {}
    return bool(settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
