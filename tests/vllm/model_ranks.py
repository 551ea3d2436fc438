"""What the ranks of the model tests do: several versions by index writes, and a fresh load to compare with.

The models are real, of vLLM.

The oracle is a numpy state per version and vLLM's own loader. Everything a rank finds wrong goes back as a sentence.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from tests.vllm.engines import differing, live_bits
from tests.vllm.models_direct import Models, context_of
from tests.vllm.tiny import read_checkpoint, write_weights

_SPECIAL = {  # NaNs with payloads, -0.0, 0.0, infinities, a subnormal
    "BF16": [0x7FC0, 0xFFC1, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001],
    "F32": [0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000, 0x00000000, 0x7F800000, 0xFF800000, 0x00000001],
}


def states_of(base):
    """Versions 0 to 4: base, sparse, special values, dense, sparse again."""
    generator = np.random.default_rng(17)
    state, dtypes = read_checkpoint(Path(base))
    states = [state]
    for kind in ("sparse", "special", "dense", "sparse"):
        state = {name: bits.copy() for name, bits in state.items()}
        for name in sorted(state):  # the order in a file is not the same for every reader
            flat = state[name].reshape(-1)
            if kind == "dense":
                flat ^= generator.integers(1, 16, flat.size).astype(flat.dtype)
                continue
            where = generator.choice(flat.size, max(1, flat.size // 50), replace=False)
            edges = np.array([0, flat.size // 2 - 1, flat.size // 2, flat.size - 1])  # where shards end
            where = np.unique(np.concatenate([where, edges % flat.size]))
            if kind == "special":
                special = np.array(_SPECIAL[dtypes[name]], flat.dtype)
                flat[where] = special[generator.integers(0, special.size, where.size)]
            else:
                flat[where] ^= generator.integers(1, 8, where.size).astype(flat.dtype)
        states.append(state)
    return states, dtypes


def schema_of(state, dtypes):
    from torch_delta.format.schema import Schema, TensorSpec

    return Schema(tuple(TensorSpec(name, dtypes[name], state[name].shape) for name in sorted(state)))


def patch_between(schema, states, version):
    """The patch of one version, in two row boxes as two trainer ranks would send it; dense where all changed."""
    from torch_delta.format.box import Box
    from torch_delta.receive.patches import Patch, PatchSlice

    slices = {}
    for at, spec in enumerate(schema.tensors):
        old, new = states[version - 1][spec.name], states[version][spec.name]
        found = []
        half = spec.shape[0] // 2
        for first, end in ((0, half), (half, spec.shape[0])):
            box = Box((first, *(0 for _ in spec.shape[1:])), (end - first, *spec.shape[1:]))
            a, b = old[first:end].reshape(-1), new[first:end].reshape(-1)
            where = np.flatnonzero(a != b)
            if where.size == a.size and a.size:
                found.append(PatchSlice(box, None, b))
            elif where.size:
                found.append(PatchSlice(box, where.astype(np.uint32), b[where]))
        if found:
            slices[at] = tuple(found)
    return Patch(version, sum(one.value.size for many in slices.values() for one in many), slices, {})


def check_models(rank, cases, folder, num_ranks=1):
    """Check every case, ``[label, base folder, engine arguments]``; returns what the parent asserts on."""
    models = Models(rank=rank, world_size=num_ranks)
    from torch_delta.vllm.unpacked import keep_unpacked

    assert keep_unpacked()
    found = {}
    for label, base, options in cases:
        models.options = options
        found[label] = _check(models, rank, num_ranks, Path(base), Path(folder, label))
    return found


def check_experts(rank):
    """Greatest difference between vLLM's packed kernel and ours, over some shapes; and the greatest value."""
    Models()  # sets the environment
    import torch
    import vllm._custom_ops as ops

    from torch_delta.vllm.unpacked import _experts

    assert rank == 0
    torch.manual_seed(0)
    found = []
    for tokens, experts, top_k, hidden, inner in ((1, 4, 2, 64, 32), (33, 8, 3, 128, 64)):
        x = torch.randn(tokens, hidden).bfloat16()
        up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).bfloat16()
        down = (torch.randn(experts, hidden, inner) / inner**0.5).bfloat16()
        weights, ids = torch.randn(tokens, experts).softmax(-1).topk(top_k)
        packed = [ops.cpu_prepack_moe_weight(weight.clone(), "vec") for weight in (up, down)]
        expected, ours = torch.empty_like(x), torch.empty_like(x)
        ops.cpu_fused_moe(expected, x, *packed, None, None, weights.contiguous(), ids.int().contiguous(), "silu", "vec")
        _experts(ours, x, (up, None), (down, None), weights, ids, "silu")
        found.append([float((expected.float() - ours.float()).abs().max()), float(expected.float().abs().max())])
    return found


def _gathered(value, world_size):
    import torch.distributed as dist

    found = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def _check(models, rank, world_size, base, work):
    from torch_delta.codec.digest import digest_array
    from torch_delta.format.digest import ZERO
    from torch_delta.vllm.routing import LiveModel, check_summaries

    states, dtypes = states_of(base)
    schema = schema_of(states[0], dtypes)
    digests = [{at: digest_array(state[spec.name]) for at, spec in enumerate(schema.tensors)} for state in states]
    config, model = models.load(base)
    before = live_bits(model)
    live = LiveModel.probe(model, schema, context=context_of(config), num_threads=2)
    found = {"wrong": [f"the probe wrote: {line}" for line in differing(before, live_bits(model))]}
    live.settle(_gathered(live.reach, world_size), rank)
    found["ignored"] = sorted(schema.tensors[at].name for at in live.ignored)

    def read(tensor, box):
        where = tuple(slice(first, first + extent) for first, extent in zip(box.offset, box.shape, strict=True))
        return states[0][schema.tensors[tensor].name][where]

    for failed in _gathered(live.prove(read), world_size):
        live.withdraw(failed)
    found["unrouted"] = {schema.tensors[at].name: reason for at, reason in live.unrouted.items()}
    found["num_routed"] = len(live.routed)

    def check_digests(version):
        shares = _gathered(live.digest(), world_size)
        for at in live.routed:
            if sum((share[at] for share in shares), ZERO) != digests[version][at]:
                found["wrong"].append(f"digest of {schema.tensors[at].name} at version {version}")

    check_digests(0)
    version = 0
    for target in (1, 3, 4):
        patches = [patch_between(schema, states, at) for at in range(version + 1, target + 1)]
        plan = live.plan(patches)
        summaries = _gathered(plan.summary, world_size)
        check_summaries(
            summaries, before=digests[version], after=digests[target], names=lambda at: schema.tensors[at].name
        )
        held = live_bits(model)
        undo = live.write(plan)
        written = live_bits(model)
        live.rollback(undo)
        found["wrong"] += [f"rollback of {target}: {line}" for line in differing(held, live_bits(model))]
        live.write(plan)
        found["wrong"] += [f"second write of {target}: {line}" for line in differing(written, live_bits(model))]
        version = target
        check_digests(version)
    live.close()

    fresh_folder = work.with_name(f"{work.name}-at-4")
    if rank == 0:
        fresh_folder.mkdir(parents=True)
        for path in base.iterdir():
            if ".safetensors" not in path.name:
                (fresh_folder / path.name).write_bytes(path.read_bytes())
        routed = {schema.tensors[at].name for at in live.routed}
        # What goes by reload is not applied here, so the fresh engine gets its old bits.
        mixed = {name: states[4 if name in routed else 0][name] for name in states[0]}
        write_weights(fresh_folder, mixed, dtypes)
    _gathered(None, world_size)
    with contextlib.ExitStack() as stack:
        stack.callback(_gathered, None, world_size)
        _, fresh = models.load(fresh_folder)
        found["wrong"] += [f"against a fresh load: {line}" for line in differing(live_bits(fresh), live_bits(model))]
    return found
