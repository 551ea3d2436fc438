"""Training jobs that publish, run on real gloo ranks by `tests._dist`; each dumps what every version must be.

The oracle gathers every parameter with `full_tensor`, casts it with torch and writes it as transformers would, under
its checkpoint name: none of the code under test.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.core_model_loading import revert_weight_conversion

import torch_delta
from tests.capture.models import moe


def write_base(folder, kind="qwen3"):
    """A random tied Qwen3 in bf16 whose rows do not divide by the number of ranks, or an MoE with fused experts."""
    torch.manual_seed(0)
    if kind != "qwen3":
        moe(kind).to(torch.bfloat16).save_pretrained(folder)
        return
    config = Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def dump(model, folder, version):
    """Rank 0 writes what is served now: every parameter gathered and cast."""
    weights = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name] = full.detach().to(torch.bfloat16).clone()
    if dist.get_rank() == 0:
        weights = {name: bits.contiguous() for name, bits in revert_weight_conversion(model, weights).items()}
        Path(folder).mkdir(exist_ok=True)
        save_file(weights, Path(folder, f"{version}.safetensors"))


def build(base, *, hsdp, dtype):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    world = dist.get_world_size()
    if hsdp:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    tokens = torch.randint(0, model.config.vocab_size, (2, 12), generator=generator)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    rank,
    *,
    root,
    num_versions,
    every,
    mode,
    dtype,
    hsdp=False,
    first_version=0,
    resume_from=None,
    on_restart="fork",
):
    """Publish `num_versions` versions and dump each; returns (versions reported, changed elements of each)."""
    root = Path(root)
    model = build(resume_from if resume_from is not None else root / "base", hsdp=hsdp, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    seen, changed = [], []
    with torch_delta.attach(
        optimizer,
        model,
        str(root / "stream"),
        base=str(root / "base"),
        every=every,
        mode=mode,
        config=torch_delta.PublishConfig(on_restart=on_restart),
    ) as publisher:
        assert publisher.version == first_version
        for version in range(first_version + 1, first_version + num_versions + 1):
            for inner in range(every):
                step(model, optimizer, version * every + inner)
            report = publisher.wait(version)
            seen.append(report.version)
            changed.append(report.num_changed)
            dump(model, root / "expected", version)
    return seen, changed


def train_without_base(rank, *, root):
    """Start a stream from the model itself: an anchor first, then one delta."""
    root = Path(root)
    model = build(root / "base", hsdp=False, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step(model, optimizer, 0)  # away from any checkpoint
    dump(model, root / "expected", 0)
    with torch_delta.attach(optimizer, model, str(root / "stream"), base=None) as publisher:
        step(model, optimizer, 1)
        publisher.wait(1)
        dump(model, root / "expected", 1)
        publisher.anchor()
    return publisher.version
