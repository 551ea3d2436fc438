"""What the ranks of the distributed capture tests do. Each scenario returns a list of complaints."""

from __future__ import annotations

import copy
import re
import traceback

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from tests._accelerate import is_sharded, shard_on_cpus
from tests.capture import oracle
from tests.capture.models import Tiny, moe, tokens
from torch_delta.capture import shards
from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.tensorsource import TensorSource
from torch_delta.errors import CaptureError
from torch_delta.format.schema import Schema, TensorSpec

ROUNDS = (1, 1, 3)
"""Optimizer steps before each collect."""


def matrix(rank, names):
    """Run scenarios one after the other on the same processes; {scenario: complaints}."""
    results = {}
    for name in names:
        try:
            results[name] = _run(name)
        except Exception:
            results[name] = [traceback.format_exc()]
        dist.barrier()
    return results


def _run(name):
    if name in SPECIAL:
        return SPECIAL[name]()
    layout, kind, dtype, mode = name.split("-")
    torch.manual_seed(0)
    inner = Tiny(tie=layout != "fsdp_tp") if kind == "tiny" else moe(kind)
    inner = inner.to(torch.bfloat16) if dtype == "bf16" else inner.float()
    model = _shard(layout, inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=layout != "ignored")
    capture = Capture(optimizer, model, config=CaptureConfig(mode=mode))
    reference = inner if kind != "tiny" else None
    complaints = []
    counts = oracle.owned_counts(capture.schema, oracle.gather(capture.owned))
    complaints += [f"{n}: not owned exactly once" for n, c in counts.items() if not (c == 1).all()]
    before = oracle.checkpoint(model, reference)
    missing = {s.name for s in capture.schema.tensors if s.alias_of is None} ^ before.keys()
    complaints += [f"name {n} is on one side only" for n in missing if n != "head.weight"]
    total = 0
    for number, steps in enumerate(ROUNDS):
        for step in range(steps):
            _train(model, optimizer, kind, 10 * number + step)
        if kind == "tiny" and number == 1:
            inner.bias_correction.add_(1)
        collected = capture.collect()
        after = oracle.checkpoint(model, reference)
        everyone = oracle.gather(collected.changes)
        complaints += oracle.mismatches(capture.schema, everyone, before, after)
        complaints += _digests(capture, after)
        complaints += [] if collected.num_steps == steps else [f"{collected.num_steps} steps counted, not {steps}"]
        total += sum(change.count for changes in everyone for change in changes)
        capture.commit(collected.token)
        if number == 0:
            complaints += _controls(capture.schema, everyone, before, after)
        before = after
    capture.close()
    return complaints + ([] if total else ["nothing changed at all"])


def _shard(layout, model):
    if layout == "plain":
        return model
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return _fully_shard(model, mesh=mesh)
    if layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return _fully_shard(model, mesh=mesh["dp"])
    if layout == "ignored":
        return _fully_shard(model, ignored_params={model.norm.weight, model.gain})
    if layout == "offload":
        return _fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert layout == "fsdp"
    return _fully_shard(model)


def _fully_shard(model, **options):
    for layer in getattr(getattr(model, "model", None), "layers", []):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _train(model, optimizer, kind, step):
    batch = tokens(step)
    loss = model(batch) if kind == "tiny" else model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _digests(capture, after):
    """Ranks' digests add up to the digest of the whole state, by the plain-Python definition."""
    from torch_delta.format.digest import ZERO, digest_words

    totals: dict[int, object] = {}
    for digests in oracle.gather(capture.digests()):
        for tensor, digest in digests.items():
            totals[tensor] = totals.get(tensor, ZERO) + digest
    return [
        f"{capture.schema.tensors[tensor].name}: digest"
        for tensor, digest in totals.items()
        if digest != digest_words(after[capture.schema.tensors[tensor].name].reshape(-1).tolist())
    ]


def _controls(schema, everyone, before, after):
    """The comparison must notice a lost change, a doubled one, and a wrong bit; else it proves nothing."""
    complaints = []
    if not oracle.mismatches(schema, [*everyone[1:], everyone[0][1:]], before, after) and everyone[0]:
        complaints.append("control: a lost change went unnoticed")
    filled = next(changes for changes in everyone if changes)
    if not oracle.mismatches(schema, [*everyone, filled[:1]], before, after):
        complaints.append("control: a doubled change went unnoticed")
    broken = copy.deepcopy(everyone)
    first = next(changes for changes in broken if changes)[0]
    first.new[0] ^= 1
    if not oracle.mismatches(schema, broken, before, after):
        complaints.append("control: a wrong bit went unnoticed")
    return complaints


def _balance():
    """HSDP copies are shared out by bytes: no rank owns much more than another (F46: ranks that hold copies)."""
    model = _shard("hsdp", torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8))))
    capture = Capture(torch.optim.SGD(model.parameters(), lr=0.1), model)
    owned = oracle.gather(sum(item.box.numel for item in capture.owned))
    capture.close()
    return [] if max(owned) <= 1.1 * min(owned) else [f"owned elements by rank: {owned}"]


def _copies_differ():
    """Different tensors under one name are not copies (F40); every rank learns which."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 4)
    return _expect("hold the same elements with different values", model)


def _one_rank_refuses():
    """What one rank refuses, all ranks raise, with the rank that did; nobody waits (F32)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    trained = [model.weight] if dist.get_rank() == 2 else [model.weight, model.bias]
    return _expect(r"bias.*rank 2 of 4", model, trained)


def _expect(pattern, model, trained=None):
    try:
        Capture(torch.optim.SGD(trained or model.parameters(), lr=0.1), model)
    except CaptureError as error:
        return [] if re.search(pattern, str(error)) else [f"wrong message: {error}"]
    return ["not refused"]


def _rank_zero_walks():
    """A source that only rank 0 can walk; the others own nothing and still take part."""
    return _walk(lambda: dist.get_rank() == 0, {0})


def _all_walk():
    """A walk every rank makes; shares are disjoint and balanced."""
    return _walk(lambda: True, {0, 1, 2, 3})


def _walk(can_walk, owners):
    torch.manual_seed(0)
    tensors = {f"t{number}": torch.randn(6, 5) for number in range(9)}
    schema = Schema(tuple(TensorSpec(name, "BF16", (6, 5)) for name in sorted(tensors)))
    source = TensorSource(tensors.items if can_walk() else None, schema)
    complaints = []
    everyones = oracle.gather(source.owned)
    counts = oracle.owned_counts(schema, everyones)
    complaints += [f"{n}: not owned exactly once" for n, c in counts.items() if not (c == 1).all()]
    complaints += [] if {r for r, owned in enumerate(everyones) if owned} == owners else [f"owners: {everyones}"]
    before = {name: oracle.bits(tensor.to(torch.bfloat16)) for name, tensor in tensors.items()}
    tensors["t3"][2, 2] += 1
    tensors["t7"].neg_()
    after = {name: oracle.bits(tensor.to(torch.bfloat16)) for name, tensor in tensors.items()}
    collected = source.collect()
    complaints += oracle.mismatches(schema, oracle.gather(collected.changes), before, after)
    source.rollback(collected.token)
    again = source.collect()
    complaints += oracle.mismatches(schema, oracle.gather(again.changes), before, after)
    complaints += _digests(source, after)
    source.close()
    return complaints


def _accelerate():
    """Accelerate-wrapped model and optimizer, two micro-batches per step; hooks fire on synchronising steps only."""
    return _with_accelerate(prepare_first=True)


def _late_prepare():
    """Attached before `accelerator.prepare` replaced the parameters: bound again, by all ranks, at the first step."""
    return _with_accelerate(prepare_first=False)


def _with_accelerate(*, prepare_first):
    import accelerate
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import FullyShardedDataParallelPlugin

    shard_on_cpus()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inner = Tiny()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=3e-3)
    capture = None
    if not prepare_first:
        capture = Capture(optimizer, inner)
    model, wrapped = accelerator.prepare(inner, optimizer)
    if capture is None:
        capture = Capture(wrapped, model)
    assert is_sharded(model)
    before = oracle.checkpoint(model)
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(tokens(step)))
            wrapped.step()
            wrapped.zero_grad()
    collected = capture.collect()
    after = oracle.checkpoint(model)
    complaints = oracle.mismatches(capture.schema, oracle.gather(collected.changes), before, after)
    counts = oracle.owned_counts(capture.schema, oracle.gather(capture.owned))
    complaints += [f"{n}: not owned exactly once" for n, c in counts.items() if not (c == 1).all()]
    complaints += [] if collected.num_steps == 2 else [f"{collected.num_steps} steps seen, 2 were made"]
    complaints += [] if collected.num_changed else ["nothing changed at all"]
    capture.close()
    return complaints


def _fsdp1():
    """Flat parameters hold no tensor of the checkpoint."""
    import warnings

    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    return _expect("FSDP1 .* use FSDP2", model)


def _unsharded():
    """Between forward and backward the parameters are not the optimizer's; after `reshard` they are again."""
    torch.manual_seed(0)
    model = Tiny()
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(0))
    complaints = []
    try:
        Capture(optimizer, model)
        complaints.append("not refused")
    except CaptureError as error:
        complaints += [] if "unsharded" in str(error) else [f"wrong message: {error}"]
    model.reshard()
    Capture(optimizer, model).close()
    return complaints


def _partial():
    """Partial sums are not elements."""
    mesh = init_device_mesh("cpu", (4,))
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    return _expect(r"weight: placement .* cannot be published", model)


def _contradictory():
    """A local tensor of another shape than its placements say: padding, or a placement that torch divides otherwise."""
    mesh = init_device_mesh("cpu", (4,))
    model = torch.nn.Linear(4, 8, bias=False)
    local = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False, shape=(8, 4), stride=(4, 1))
    model.weight = torch.nn.Parameter(local)
    return _expect(r"weight: the local tensor has shape \(3, 4\), its placements .* say \(2, 4\)", model)


def _stages():
    """Pipeline-like: each rank holds tensors no other rank has; names and owners come from all of them."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = torch.nn.ModuleDict({"shared": torch.nn.Linear(2, 2), f"stage{rank}": torch.nn.Linear(3, 2 + rank)})
    capture = Capture(torch.optim.SGD(model.parameters(), lr=0.1), model)
    names = [spec.name for spec in capture.schema.tensors]
    expected = sorted(f"{m}.{p}" for m in ["shared", *(f"stage{r}" for r in range(4))] for p in ["bias", "weight"])
    counts = oracle.owned_counts(capture.schema, oracle.gather(capture.owned))
    capture.close()
    bad = [f"{n}: not owned exactly once" for n, c in counts.items() if not (c == 1).all()]
    return bad + ([] if names == expected else [f"names: {names}"])


def _wrong_offsets():
    """The self-test at attach notices when our arithmetic and torch's placement of elements disagree (F34)."""
    model = _shard("fsdp", Tiny())
    right = shards.global_indices
    shards.global_indices = lambda shard: right(shard).flip(0)
    try:
        return _expect("places elements of .* differently", model)
    finally:
        shards.global_indices = right


def _no_dtensor_operations():
    """F43: neither hooks nor collects run an operation on a DTensor."""
    torch.manual_seed(0)
    model = _shard("fsdp", Tiny())
    complaints = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                complaints.append(str(func))
            return func(*args, **(kwargs or {}))

    for mode in ("transient", "persistent"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        capture = Capture(optimizer, model, config=CaptureConfig(mode=mode))
        model(tokens(0)).backward()
        with Watch():
            capture._before_step(0)
        optimizer.step()
        with Watch():
            capture._after_step(0)
            capture.commit(capture.collect().token)
        capture.close()
    found = list(complaints)
    with Watch():
        model.up.weight.sum()
    return found + ([] if len(complaints) > len(found) else ["control: the watch sees nothing"])


def _wrapped():
    """Activation checkpointing, compiled layers, FSDP2 and a compiled whole (F21): plain names, every change once."""
    torch.manual_seed(0)
    inner = Tiny()
    inner.up = checkpoint_wrapper(inner.up)
    inner.norm = torch.compile(inner.norm, backend="eager")
    model = torch.compile(_shard("fsdp", inner), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    capture = Capture(optimizer, model)
    before = oracle.checkpoint(model)
    complaints = []
    for step in range(2):
        _train(model, optimizer, "tiny", step)
    collected = capture.collect()
    complaints += oracle.mismatches(capture.schema, oracle.gather(collected.changes), before, oracle.checkpoint(model))
    complaints += [] if collected.num_steps == 2 else [f"{collected.num_steps} steps counted, not 2"]
    names = {spec.name for spec in capture.schema.tensors}
    complaints += [] if names == {*Tiny().state_dict()} else [f"names: {sorted(names)}"]
    complaints += [] if sum(oracle.gather(collected.num_changed)) else ["nothing changed at all"]
    capture.close()
    return complaints


def _standalone():
    """`Capture.changes()`: what all ranks report of their shards is the difference of the full tensors, once each."""
    complaints = []
    for layout in ("fsdp", "hsdp", "fsdp_tp"):
        torch.manual_seed(0)
        model = _shard(layout, Tiny(tie=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        capture = Capture(optimizer, model)
        before = oracle.checkpoint(model)
        for steps in (1, 3):
            for step in range(steps):
                _train(model, optimizer, "tiny", step)
            after = oracle.checkpoint(model)
            complaints += [f"{layout}: {text}" for text in _shard_changes(model, capture.changes(), before, after)]
            before = after
        capture.close()
    return complaints


def _shard_changes(model, changes, before, after):
    complaints = []
    local = {name: tensor.to_local() for name, tensor in model.named_parameters()}
    mine = {}
    for name, change in changes.items():
        if name in local and change.mask.shape != local[name].shape:
            complaints.append(f"{name}: a mask of {change.mask.shape} over a shard of {local[name].shape}")
        if not torch.equal(change.mask.reshape(-1).nonzero().view(-1), change.index):
            complaints.append(f"{name}: mask and index differ")
        if not torch.equal(change.xor, change.old ^ change.new):
            complaints.append(f"{name}: xor")
        mine[name] = [part.numpy().copy() for part in (change.global_index, change.old, change.new)]
    everyones = oracle.gather(mine)
    total = 0
    for name, was in before.items():
        parts = [rank[name] for rank in everyones if name in rank]
        at, old, new = (np.concatenate([part[kind] for part in parts]) for kind in range(3))
        order = np.argsort(at)
        truth = np.flatnonzero(was.reshape(-1) != after[name].reshape(-1))
        total += len(truth)
        if not np.array_equal(at[order], truth):
            complaints.append(f"{name}: {len(at)} positions reported, {len(truth)} changed")
        elif not np.array_equal(old[order].view(was.dtype), was.reshape(-1)[truth]):
            complaints.append(f"{name}: old bits")
        elif not np.array_equal(new[order].view(was.dtype), after[name].reshape(-1)[truth]):
            complaints.append(f"{name}: new bits")
    return complaints + ([] if total else ["nothing changed at all"])


SPECIAL = {
    "fsdp1": _fsdp1,
    "wrapped": _wrapped,
    "standalone": _standalone,
    "wrong_offsets": _wrong_offsets,
    "no_dtensor_operations": _no_dtensor_operations,
    "unsharded": _unsharded,
    "partial": _partial,
    "contradictory": _contradictory,
    "stages": _stages,
    "balance": _balance,
    "copies_differ": _copies_differ,
    "one_rank_refuses": _one_rank_refuses,
    "rank_zero_walks": _rank_zero_walks,
    "all_walk": _all_walk,
    "accelerate": _accelerate,
    "late_prepare": _late_prepare,
}
