"""An independent answer to "what does the checkpoint hold now": gather everything, convert, cast, compare."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def full_state(model):
    """Canonical names -> full tensors, by torch's own gather; tied names are all listed."""
    state = {}
    for name, tensor in list(model.named_parameters(remove_duplicate=False)) + list(model.named_buffers()):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state[_plain(name)] = full.detach().clone()
    return state


def _plain(name):
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def checkpoint(model, transformers_model=None, dtype=torch.bfloat16):
    """Checkpoint names -> unsigned bits as `save_pretrained` would write them in `dtype` (buffers keep theirs)."""
    state = full_state(model)
    saved = {_plain(name) for name in model.state_dict()}
    state = {name: tensor for name, tensor in state.items() if name in saved}
    buffers = {_plain(name) for name, _ in model.named_buffers()}
    cast = {n: t if n in buffers or dtype is None else t.to(dtype) for n, t in state.items()}
    if transformers_model is not None:
        from transformers.core_model_loading import revert_weight_conversion

        cast = revert_weight_conversion(transformers_model, cast)
    return {n: bits(t) for n, t in cast.items()}


def bits(tensor):
    tensor = tensor.detach().cpu().contiguous()
    flat = tensor.reshape(-1).view(INTEGER[tensor.element_size()]).numpy()
    return flat.view(UNSIGNED[tensor.element_size()]).reshape(tuple(tensor.shape)).copy()


def window_of(box):
    return tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))


def flatten(change, shape):
    """A change as (flat indices in the full tensor, old or None, new), without the product's own index arithmetic."""
    grid = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    flat = grid[window_of(change.box)].reshape(-1)
    if change.index is None:
        return flat, None, change.new
    return flat[change.index.astype(np.int64)], change.old, change.new


def gather(value):
    if not dist.is_initialized():
        return [value]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def mismatches(schema, everyones_changes, before, after):
    """Compare the union of all ranks' changes with the true difference of two checkpoints; a list of complaints."""
    complaints = []
    found: dict[str, list] = {}
    for changes in everyones_changes:
        for change in changes:
            try:
                change.check(schema)
            except ValueError as error:
                complaints.append(str(error))
            spec = schema.tensors[change.tensor]
            truth = after[spec.name][window_of(change.box)].reshape(-1)
            if change.dense is not None and not np.array_equal(change.dense, truth):
                complaints.append(f"{spec.name}: dense bits are not the bits")
            found.setdefault(spec.name, []).append(flatten(change, spec.shape))
    for spec in schema.tensors:
        if spec.alias_of is not None:
            continue
        old, new = before[spec.name].reshape(-1), after[spec.name].reshape(-1)
        truth = np.flatnonzero(old != new)
        parts = found.get(spec.name, [])
        index = np.concatenate([part[0] for part in parts]) if parts else np.empty(0, np.int64)
        if len(np.unique(index)) != len(index):
            complaints.append(f"{spec.name}: an element is reported twice")
        exact = [part for part in parts if part[1] is not None]
        resent = [part for part in parts if part[1] is None]
        if not resent and not np.array_equal(np.sort(index), truth):
            complaints.append(f"{spec.name}: {len(index)} reported, {len(truth)} changed")
        if resent and not set(truth.tolist()) <= set(index.tolist()):
            complaints.append(f"{spec.name}: a re-send misses changed elements")
        for flat, was, now in exact:
            if not np.array_equal(was, old[flat]) or not np.array_equal(now, new[flat]):
                complaints.append(f"{spec.name}: reported bits are not the bits")
        for flat, _, now in resent:
            if not np.array_equal(now, new[flat]):
                complaints.append(f"{spec.name}: re-sent bits are not the bits")
    unknown = found.keys() - {spec.name for spec in schema.tensors}
    return complaints + [f"{name}: unknown" for name in unknown]


def owned_counts(schema, everyones_owned):
    """How often each element of each tensor is owned."""
    counts = {spec.name: np.zeros(spec.shape, np.int64) for spec in schema.tensors if spec.alias_of is None}
    for owned in everyones_owned:
        for item in owned:
            counts[schema.tensors[item.tensor].name][window_of(item.box)] += 1
    return counts
