"""Binding a live model: from modules and optimizers to the units this rank owns.

Everything that can be refused is refused here, on all ranks together: each rank looks at its own model without
talking, puts either its claim or its complaint into one exchange, and only then anyone raises. After the exchange all
ranks compute the same owners and the same schema.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_delta.capture import arrays
from torch_delta.capture.layout import checkpoint_layout
from torch_delta.capture.names import as_transformers_model, model_tensors
from torch_delta.capture.optimizer_hooks import refuse_unseen_steps, unwrap_optimizer
from torch_delta.capture.ownership import Claim, Held, elect, exchange
from torch_delta.capture.regions import pieces_of
from torch_delta.capture.resolve import Resolved, build_schema, matches, refuse_quantised, resolve, some
from torch_delta.capture.shards import local_tensor, self_test, shard_of
from torch_delta.capture.unit import Unit
from torch_delta.errors import CaptureError
from torch_delta.format.digest import ZERO, Digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from torch_delta.capture.config import CaptureConfig
    from torch_delta.capture.names import ModelTensor
    from torch_delta.capture.regions import Piece
    from torch_delta.capture.shards import Shard
    from torch_delta.format.schema import Schema


@dataclass(frozen=True, slots=True)
class Binding:
    """What a capture works on."""

    schema: Schema
    optimizers: tuple[torch.optim.Optimizer, ...]
    """Unwrapped."""
    units: tuple[Unit, ...]
    """This rank's, in the model's order."""
    bound: list[weakref.ref[torch.Tensor]]
    """The optimizers' parameters, in order."""
    constant: tuple[int, ...]
    """Schema indices of checkpoint tensors no model holds (allowed by the configuration)."""

    def is_stale(self) -> bool:
        """Whether the optimizers' parameters are other objects than those bound.

        Parameters added since (`add_param_group` when layers are unfrozen) are taken up: their units are there already.
        """
        now = list(_parameters(self.optimizers))
        by_id = {id(parameter) for _, parameter in now}
        if any(reference() is None or id(reference()) not in by_id for reference in self.bound):
            return True
        if len(now) != len(self.bound):
            self._follow(now)
        return False

    def _follow(self, now: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.bound[:] = [weakref.ref(parameter) for _, parameter in now]
        numbers = {id(parameter): number for number, parameter in now}
        for unit in self.units:
            unit.stepped_by = numbers.get(id(unit.tensor), -1)


@dataclass(frozen=True, slots=True)
class _Local:
    """One rank's view of its own model."""

    tensors: Mapping[str, ModelTensor]
    shards: Mapping[str, Shard]
    pieces: Mapping[str, Sequence[Piece]]
    """By model name; `tensor` counts the checkpoint tensors inside that model tensor, not yet the schema's."""
    resolved: Resolved


def bind(
    given: Sequence[Any],
    model: nn.Module,
    base: Schema | None,
    config: CaptureConfig,
    group: dist.ProcessGroup | None,
) -> Binding:
    """Look at the model, agree with the other ranks, choose owners. Collective over `group`.

    Args:
        given: optimizers, wrapped or not.
        model: the live model.
        base: the checkpoint, or None.
        config: see `CaptureConfig`.
        group: None for all ranks.

    Raises:
        CaptureError: on all ranks alike, with `.failures` by rank where ranks had different complaints.
    """
    local: _Local | None = None
    cause: Exception | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    try:
        optimizers = tuple(unwrap_optimizer(item) for item in given)
        local = _look(optimizers, model, base, config)
        claim = Claim(_held(local), _print(local.resolved))
    except Exception as error:  # the other ranks are already waiting in the exchange
        claim, cause = Claim.refusal(error), error
    rank, claims = exchange(claim, group, cause=cause)
    assert local is not None
    owned = elect(claims)[rank]
    specs = dict(local.resolved.specs)
    if len({other.views_print for other in claims}) > 1:  # pipeline stages hold different tensors
        for theirs in _gather(specs, group):
            specs.update(theirs)
    hints = "".join(f" {hint}." for hint in local.resolved.hints[:2])
    schema = build_schema(base, specs, config, hints)
    self_test((name, local.tensors[name].tensor) for name in sorted(local.resolved.views))
    units = []
    for name, parts in local.pieces.items():
        if name in owned:
            indices = [schema.index(target) for target in local.resolved.names[name]]
            pieces = [replace(part, tensor=indices[part.tensor]) for part in parts]
            serving = arrays.SERVING_DTYPES[schema.tensors[indices[0]].dtype]
            units.append(Unit(local.tensors[name], local.shards[name], pieces, serving))
    constant = tuple(number for number, spec in enumerate(schema.tensors) if spec.name not in specs)
    binding = Binding(schema, optimizers, tuple(units), [], constant)
    binding._follow(list(_parameters(optimizers)))
    return binding


def gather_digests(digests: Mapping[int, Digest], group: dist.ProcessGroup | None) -> dict[int, Digest]:
    """Sum every rank's digests by tensor. Collective over `group`."""
    totals: dict[int, Digest] = {}
    for theirs in _gather(dict(digests), group):
        for tensor, digest in theirs.items():
            totals[tensor] = totals.get(tensor, ZERO) + digest
    return totals


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the optimizer, parameter)."""
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield number, parameter


def _look(
    optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, base: Schema | None, config: CaptureConfig
) -> _Local:
    """This rank's model, checked. No collective."""
    _refuse_wrappers(model)
    refuse_unseen_steps(optimizers)
    if base is not None:
        refuse_quantised(base)
    tensors = model_tensors(model)
    for item in tensors:
        _refuse_tensor(item)
    _match_optimizers(optimizers, tensors, config)
    inner = as_transformers_model(model)
    ties = bool(getattr(getattr(inner, "config", None), "tie_word_embeddings", False))
    resolved = resolve(tensors, checkpoint_layout(model, tensors), base, config, ties=ties)
    by_name = {item.name: item for item in tensors if item.name in resolved.views}
    shards = {name: shard_of(name, item.tensor) for name, item in by_name.items()}
    pieces = {name: pieces_of(dict(enumerate(resolved.views[name])), shard) for name, shard in shards.items()}
    return _Local(by_name, shards, pieces, resolved)


def _refuse_wrappers(model: nn.Module) -> None:
    """Refuse models whose parameters are not, now, the sharded ones an optimizer updates."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise CaptureError("FSDP1 (FullyShardedDataParallel) flattens parameters; use FSDP2 (fully_shard)")
        state: Any = getattr(module, "_get_fsdp_state", None)
        if state is None or not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            continue
        state = state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
        if not all(group.is_sharded for group in groups):
            raise CaptureError(
                f"parameters of {name or 'the model'} are unsharded (between forward and backward, or kept by "
                "reshard_after_forward=False); attach while sharded: before the forward, after backward, or after "
                "reshard()",
                tensor=name,
            )


def _refuse_tensor(item: ModelTensor) -> None:
    local = local_tensor(item.tensor)
    if local.device.type == "meta":
        raise CaptureError(f"{item.name} is on the meta device; materialise the model before attaching")
    if type(local) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        raise CaptureError(
            f"{item.name} is a {type(local).__name__}, whose bits are not those of an ordinary tensor; quantised and "
            "custom tensor types cannot be captured",
            tensor=item.name,
        )
    if local.layout != torch.strided:
        raise CaptureError(f"{item.name} has layout {local.layout}; only dense tensors can be captured")


def _match_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], tensors: Sequence[ModelTensor], config: CaptureConfig
) -> None:
    """Every trained tensor must be updated by exactly one of the optimizers (F44)."""
    counts: dict[int, int] = {}
    for optimizer in optimizers:
        for key in {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
            counts[key] = counts.get(key, 0) + 1
    trained = [item for item in tensors if item.trainable and not matches(item.name, config.exclude)]
    missing = [item.name for item in trained if id(item.tensor) not in counts]
    if missing:
        stale = len(missing) == len(trained)
        why = (
            "The optimizer holds none of the model's parameters: it was probably built before fully_shard replaced "
            "them. Build it afterwards, or let accelerate.prepare exchange them first."
            if stale
            else "Add them to the optimizer, pass all optimizers, or freeze them."
        )
        raise CaptureError(
            f"trained parameters are in no optimizer: {some(missing)}. {why}", tensor=missing[0], tensors=tuple(missing)
        )
    twice = [item.name for item in trained if counts[id(item.tensor)] > 1]
    if twice:
        raise CaptureError(f"parameters are in more than one optimizer: {some(twice)}", tensor=twice[0])


def _held(local: _Local) -> dict[str, Held]:
    """What to tell the others: every non-empty part, with a fingerprint of its serving bits."""
    held = {}
    for name, shard in local.shards.items():
        if not shard.numel:
            continue
        item = local.tensors[name]
        serving = arrays.SERVING_DTYPES[local.resolved.specs[local.resolved.names[name][0]].dtype]
        bits = arrays.to_bits(local_tensor(item.tensor).reshape(-1), serving)
        mark = arrays.fingerprint(bits).cpu().numpy().tobytes()
        held[name] = Held(shard.shape, shard.runs, bits.numel() * bits.element_size(), item.is_buffer, mark)
    return held


def _print(resolved: Resolved) -> str:
    lines = sorted(f"{s.name}\0{s.dtype}\0{s.shape}\0{s.alias_of}" for s in resolved.specs.values())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _gather(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """One object from every rank; itself where there is one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered
