"""Tied weights: one tensor under two names, which checkpoints hold once or twice and trainers export once or twice.

A stream's schema says which names share a tensor (aliases). Shards of a model bring that knowledge along; a source that
is walked has only names. So a walk takes over what the stream says, and for a new stream what the base's configuration
says, or a restart would find other tensors than its own.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from torch_delta.errors import CaptureError
from torch_delta.format.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.publish.base import BaseCheckpoint

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def is_tied(base: BaseCheckpoint) -> bool:
    """Whether the configuration beside the weights ties the head to the embedding."""
    path = base.path / "config.json"
    settings: Any = json.loads(path.read_bytes()) if path.is_file() else {}
    text = settings.get("text_config") or {}
    return bool(settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def walked_schema(base: BaseCheckpoint, stream: Schema | None) -> Schema:
    """The schema of a walk: as the stream has it, where that differs from the base in nothing but ties.

    Args:
        base: the checkpoint whose tensors are published.
        stream: of the stream, or None for a new one.
    """
    if stream is None:
        return _with_tied_head(base)
    ours = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in base.schema.tensors]
    theirs = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in stream.tensors]
    return stream if ours == theirs else base.schema


def _with_tied_head(base: BaseCheckpoint) -> Schema:
    """With the head as an alias, where the base holds it beside an embedding with the very same bits."""
    schema = base.schema
    heads = [spec for spec in schema.tensors if spec.name.endswith(_HEAD)]
    embeddings = [spec for spec in schema.tensors if spec.name.endswith(_EMBEDDING)]
    if len(heads) != 1 or len(embeddings) != 1 or not is_tied(base):
        return schema
    (head,), (embedding,) = heads, embeddings
    if (head.dtype, tuple(head.shape)) != (embedding.dtype, tuple(embedding.shape)):
        return schema
    bits = {name: array.copy() for name, array in base.bits([head.name, embedding.name])}
    if not np.array_equal(bits[head.name], bits[embedding.name]):
        return schema
    tied = dataclasses.replace(head, alias_of=embedding.name)
    return Schema(tuple(tied if spec is head else spec for spec in schema.tensors))


class Pairs:
    """What one walk yields under the names of tied tensors. Holds a digest of each, since sources may reuse memory.

    Args:
        schema: of the walk.
    """

    def __init__(self, schema: Schema) -> None:
        self._targets = {spec.name: spec.alias_of for spec in schema.tensors if spec.alias_of is not None}
        self._seen: dict[str, tuple[str, bytes]] = {}
        self._parted: list[str] = []

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What to walk for a tensor of the source: once per pair, under the name that has the data."""
        target = self._targets.get(name, name)
        if target == name and name not in self._targets.values():
            yield name, tensor
            return
        if target not in self._seen:
            self._seen[target] = (name, _digest(tensor))
            yield target, tensor
            return
        other, digest = self._seen[target]
        if digest != _digest(tensor):
            self._parted.append(f"{other} and {name}")

    def check(self) -> None:
        """After the walk.

        Raises:
            CaptureError: tensors that the stream keeps as one have become two.
        """
        if self._parted:
            raise CaptureError(
                f"the stream keeps {', '.join(self._parted)} as one tensor, but the trainer exports different weights "
                "for the two names, one of which would be lost. Publish to a new sync_dir, from a base whose "
                "configuration does not tie them",
                tensors=tuple(self._parted),
            )


def _digest(tensor: torch.Tensor) -> bytes:
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_digest(bits.data)
