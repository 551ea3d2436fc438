"""Model tensors against checkpoint tensors: the dry run that names everything before anything is captured.

Every tensor of the base must be found in the model, with its shape and a dtype it can be cast to, and every trained
tensor must be in the base: a name on one side only would silently stay at its base value for ever (F11, F53, F61).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch_delta.capture.arrays import SERVING_DTYPES, SPELLINGS, can_cast
from torch_delta.errors import CaptureError
from torch_delta.format.schema import Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_delta.capture.config import CaptureConfig
    from torch_delta.capture.layout import Layout, View
    from torch_delta.capture.names import ModelTensor

_COMPANIONS = re.compile(
    r"(_scale_inv|\.weight_scale(_\d+)?|\.qweight|\.qzeros|\.weight_packed"
    r"|\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map))$"
)
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Resolved:
    """What this rank's model contributes to the checkpoint."""

    specs: Mapping[str, TensorSpec]
    """By checkpoint name, ties as aliases."""
    views: Mapping[str, tuple[View, ...]]
    """By model name: the checkpoint tensors inside it, whose names are in `names`."""
    names: Mapping[str, tuple[str, ...]]
    """By model name: checkpoint names, in the order of `views`."""
    hints: tuple[str, ...]
    """Why some model tensors contribute nothing; for the message if a checkpoint tensor stays unresolved."""


def refuse_quantised(schema: Schema) -> None:
    """Refuse a base whose weights come with scales: its bits are not a cast of the trainer's.

    Raises:
        CaptureError: names the companions found.
    """
    names = {spec.name for spec in schema.tensors}
    found = [name for name in names if _COMPANIONS.search(name)]
    found += [name for name in names if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in names]
    found.sort()
    if found:
        raise CaptureError(
            f"the base checkpoint is quantised ({some(found)}); a trainer's weights cast to its dtype are not its "
            "weights. Use an unquantised base",
            tensors=tuple(found),
        )


def resolve(
    tensors: Sequence[ModelTensor], layout: Layout, base: Schema | None, config: CaptureConfig, *, ties: bool
) -> Resolved:
    """Match this rank's model against the base, or describe the model where there is none. No collective.

    Args:
        tensors: of the model.
        layout: where checkpoint tensors lie in them.
        base: the checkpoint, or None to publish every parameter and persistent buffer.
        config: serving dtype, exclusions.
        ties: whether the model's configuration ties embeddings, for a better message.

    Raises:
        CaptureError: see module docstring; one error lists all names of its kind.
    """
    known = {spec.name: spec for spec in base.tensors} if base is not None else None
    by_source: dict[str, list[str]] = {}
    for name, view in layout.views.items():
        by_source.setdefault(view.source, []).append(name)
    preferred = _preferred_names(layout, known)
    specs: dict[str, TensorSpec] = {}
    views: dict[str, tuple[View, ...]] = {}
    names: dict[str, tuple[str, ...]] = {}
    hints: list[str] = []
    homeless: list[str] = []
    for item in tensors:
        if matches(item.name, config.exclude):
            continue
        if item.name in layout.unmapped:
            if item.trainable:
                raise CaptureError(f"{item.name}: {layout.unmapped[item.name]}; refused", tensor=item.name)
            hints.append(f"{item.name}: {layout.unmapped[item.name]}")
            continue
        inside = by_source[item.name]
        found = [preferred.get(name, name) for name in inside]
        if known is not None:
            present = [name in known for name in found]
            if not any(present):
                if item.trainable:
                    homeless.append(item.name)
                continue
            if not all(present):
                missing = [name for name, there in zip(found, present, strict=True) if not there]
                raise CaptureError(f"{item.name}: the base lacks a part of it: {some(missing)}", tensor=item.name)
        elif not item.is_persistent:
            continue
        kinds = {}
        for name, original in zip(found, inside, strict=True):
            view = layout.views[original]
            specs[name] = _spec(item, name, view.shape, known, config)
            kinds[specs[name].dtype] = name
        if len(kinds) > 1:
            raise CaptureError(f"{item.name}: its checkpoint tensors have several dtypes: {kinds}", tensor=item.name)
        views[item.name] = tuple(layout.views[name] for name in inside)
        names[item.name] = tuple(found)
    if homeless:
        tie = " The configuration ties embeddings: sharding one of two tied modules on its own breaks the tie." * ties
        raise CaptureError(
            f"trained tensors are missing from the base: {some(homeless)}; their changes would never reach a receiver. "
            f"Freeze them, or exclude them on purpose.{tie}",
            tensors=tuple(homeless),
        )
    for alias, target in _aliases(layout, preferred, specs, known):
        spec = specs[target]
        specs[alias] = TensorSpec(name=alias, dtype=spec.dtype, shape=spec.shape, alias_of=target)
    return Resolved(specs, views, names, tuple(hints))


def build_schema(base: Schema | None, specs: Mapping[str, TensorSpec], config: CaptureConfig, hints: str) -> Schema:
    """The schema of the stream, from the tensors of all ranks.

    Args:
        base: the checkpoint, or None.
        specs: union over ranks of what their models contribute.
        config: for the checkpoint names allowed to be in no model.
        hints: appended to the message about unresolved names.

    Raises:
        CaptureError: checkpoint tensors that no rank's model holds.
    """
    if base is None:
        return Schema(tuple(sorted(specs.values(), key=lambda spec: spec.name.encode())))
    lost = [spec.name for spec in base.tensors if spec.name not in specs and not matches(spec.name, config.constant)]
    if lost:
        raise CaptureError(
            f"{len(lost)} tensors of the base are not in the model: {some(lost)}. If the model does not train them, "
            f"list them as constant.{hints}",
            tensors=tuple(lost),
        )
    untied = [s.name for s in base.tensors if s.alias_of is not None and s.name in specs and not specs[s.name].alias_of]
    if untied:
        raise CaptureError(
            f"the base ties {some(untied)}, the model does not: two different weights cannot share one name's values",
            tensors=tuple(untied),
        )
    return Schema(tuple(specs.get(spec.name, spec) for spec in base.tensors))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of some shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def some(names: Sequence[str]) -> str:
    """A few names for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _preferred_names(layout: Layout, known: Mapping[str, TensorSpec] | None) -> dict[str, str]:
    """Where the base holds tied weights only under their other name, that one is used; alias -> target otherwise."""
    if known is None:
        return {}
    renamed: dict[str, str] = {}
    for alias, target in layout.aliases.items():
        spec = known.get(alias)
        if spec is not None and spec.alias_of is None and (target not in known or known[target].alias_of == alias):
            renamed.setdefault(target, alias)
    return renamed


def _aliases(
    layout: Layout,
    preferred: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    known: Mapping[str, TensorSpec] | None,
) -> list[tuple[str, str]]:
    """(alias, target) pairs to publish; with a base only names it has."""
    pairs = set()
    for alias, target in layout.aliases.items():
        actual = preferred.get(target, target)
        if actual in specs:
            others = {alias, target} - {actual} - specs.keys()
            pairs |= {(name, actual) for name in others if known is None or name in known}
    return sorted(pairs)


def _spec(
    item: ModelTensor,
    name: str,
    shape: tuple[int, ...],
    known: Mapping[str, TensorSpec] | None,
    config: CaptureConfig,
) -> TensorSpec:
    dtype = item.tensor.dtype
    if known is None:
        serving = config.serving_dtype if config.serving_dtype is not None else dtype
        if item.is_buffer or not can_cast(dtype, serving):
            serving = dtype
        if serving not in SPELLINGS:
            raise CaptureError(f"{item.name}: dtype {serving} has no safetensors spelling", tensor=item.name)
        return TensorSpec(name=name, dtype=SPELLINGS[serving], shape=shape)
    spec = known[name]
    if tuple(spec.shape) != shape:
        raise CaptureError(
            f"{name}: the base has shape {tuple(spec.shape)}, the model {shape} (padded vocabulary, other "
            "architecture?)",
            tensor=name,
            expected=tuple(spec.shape),
            got=shape,
        )
    target = SERVING_DTYPES.get(spec.dtype)
    if target is None or not can_cast(dtype, target):
        raise CaptureError(
            f"{name}: the base stores {spec.dtype}, the model trains {dtype}; only casts between ordinary floats are "
            "exact enough to publish",
            tensor=name,
            expected=spec.dtype,
            got=str(dtype),
        )
    return TensorSpec(name=name, dtype=spec.dtype, shape=shape)
