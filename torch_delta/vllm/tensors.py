"""Which tensors of a working copy a reload feeds to the model, and in which form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch_delta.format.schema import Schema
    from torch_delta.receive.weights import Weights


def tensors_of(
    weights: Weights, touched: Collection[int] | None = None
) -> Iterator[tuple[str, np.ndarray[Any, Any], str]]:
    """Name, bits (a copy, of the tensor's shape) and safetensors dtype of the tensors to load.

    Args:
        weights: of the working copy.
        touched: load what lies in a module with one of these schema indices; None for everything.

    Yields:
        Copies, because some loaders change what they are given, and the working copy is mapped.
    """
    schema = weights.schema
    wanted = None if touched is None else {group_of(schema.tensors[index].name) for index in touched}
    for spec in schema.tensors:
        if wanted is not None and group_of(spec.name) not in wanted:
            continue
        if spec.name not in weights.folder.tensors:
            continue  # a tied weight that the checkpoint stores once, as vLLM found it when it started
        source = schema.index(spec.alias_of) if spec.alias_of is not None else schema.index(spec.name)
        yield spec.name, np.array(weights.flat(source)).reshape(spec.shape), spec.dtype


def group_of(name: str) -> str:
    """The part of a model that a checkpoint tensor belongs to: its layer, or everything outside the layers.

    Loaders fuse tensors of one layer (q, k and v; the experts), never of two, so a module that is loaded again gets all
    it is made of when its layer's tensors are loaded. What is outside the layers may be tied, and goes together.
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ""


def covers_everything(schema: Schema, touched: Collection[int]) -> bool:
    """Whether a reload of what `touched` needs would load every group, so that writing anything before is in vain."""
    every = {group_of(schema.tensors[index].name) for index in schema.data_indices}
    return every <= {group_of(schema.tensors[index].name) for index in touched}
