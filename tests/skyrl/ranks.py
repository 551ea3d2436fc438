"""What each trainer rank of a distributed run does in the tests: a process under gloo, or a Ray actor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FIELDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
"""Of the tiny model that is trained."""


def write_base(folder: Path, *, tied: bool = False, both_names: bool = False) -> Path:
    """A tiny Qwen 3 with random weights, in bf16, as transformers writes it.

    Args:
        folder: made.
        tied: whether the embedding is the head too.
        both_names: whether a tied pair is written under both of its names, as some exporters do.
    """
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.Qwen3Config(**FIELDS, head_dim=8, tie_word_embeddings=tied)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    if both_names:
        from safetensors.torch import load_file, save_file

        path = str(folder / "model.safetensors")
        tensors = load_file(path)
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def sharded(base: Path) -> Any:
    """The model in fp32 as SkyRL trains it, FSDP2-sharded over all ranks."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: Any, optimizer: Any, seed: int) -> None:
    """One step of AdamW on random tokens, the same on every rank."""
    import torch

    torch.manual_seed(seed)
    tokens = torch.randint(0, FIELDS["vocab_size"], (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def write_gathered(model: Any, folder: Path, *, rank: int) -> None:
    """What the model is, gathered with torch alone and written by rank 0 as bf16: what servers must hold."""
    import torch
    from torch.distributed.tensor import DTensor

    from tests.skyrl.checkpoints import write

    full = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full[name] = whole.detach().to(torch.bfloat16).clone()
    if rank == 0:
        write(folder, full)


def fsdp_rounds(rank: int, *, base: str, stream: str, url: str, folder: str, moved: bool) -> dict[str, Any]:
    """Three rounds of a sharded trainer.

    Args:
        rank: of the trainer.
        base: checkpoint.
        stream: `sync_dir`.
        url: of the one server.
        folder: for the model as it is after each round.
        moved: train a step before the first round, as a run does that starts from a checkpoint.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from tests.skyrl.trainers import build, end, take_seat

    take_seat()
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

    model = sharded(Path(base))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    source = FsdpWeightSource(model, torch.bfloat16)
    engine = build(Path(base), stream, [url], source, folder=Path(folder), rank=rank)
    if moved:
        train(model, optimizer, 99)
    found: dict[str, Any] = {"gathers": [], "changed": [], "versions": []}
    for number in range(3):
        engine.send_weights()
        publisher = engine._publisher
        found["gathers"].append(publisher.gathers)
        found["versions"].append(engine.version)
        found["changed"].append(engine.report.num_changed)
        write_gathered(model, Path(folder) / f"model-{number + 1}", rank=rank)
        train(model, optimizer, number)
    owned = publisher._publisher._source.owned
    found["owned"] = sum(item.box.numel for item in owned)
    end(engine)
    return found


def source_rounds(rank: int, *, base: str, stream: str, url: str, folder: str, only_first: bool) -> dict[str, Any]:
    """Two rounds of a source that is no FSDP model: whole tensors, on every rank or on rank 0 alone."""
    import torch

    from tests.skyrl.trainers import build, end, take_seat, weight_source

    take_seat()
    from safetensors.torch import load_file

    tensors = load_file(str(Path(base) / "model.safetensors"))
    walks: list[int] = []
    source = weight_source(None if only_first and rank else tensors, walks)
    engine = build(Path(base), stream, [url], source, folder=Path(folder), rank=rank)
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        for tensor in tensors.values():
            index = torch.randint(tensor.numel(), (7,), generator=generator)
            tensor.view(-1)[index] += 1.0
        engine.send_weights()
    owned = engine._publisher._publisher._source.owned
    found = {"owned": sum(item.box.numel for item in owned), "walks": len(walks), "version": engine.version}
    if rank == 0:
        from tests.skyrl.checkpoints import write

        write(Path(folder) / "wanted", tensors)
    end(engine)
    return found
