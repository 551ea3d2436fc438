"""The training job of the demo: an ordinary FSDP2 loop, and one line.

    torchrun --nproc-per-node 2 -m examples.demo.train OUT STEPS

Every rank uploads what changed in its own shards; nothing is gathered until the very end, when the demo wants something
to compare with. Rank 0 prints one JSON object per committed version.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard

import torch_delta
from examples.demo.model import contrastive_loss, load
from examples.demo.settings import LEARNING_RATE, NUM_PAIRS, WARMUP_STEPS
from examples.demo.text import sentence_pairs


def main(out: Path, num_steps: int) -> None:
    """Train, publish after every step, and write the gathered weights to `out`/trainer."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    model, tokenizer = load()
    for layer in model.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    publisher = torch_delta.attach(optimizer, model, str(out / "stream"), base=str(out / "base"))  # the one line

    pairs = sentence_pairs(seed=0)
    num_told = 0
    model.train()
    for step in range(num_steps):
        start = (step * world_size + rank) * NUM_PAIRS % (len(pairs) - NUM_PAIRS)
        contrastive_loss(model, tokenizer, pairs[start : start + NUM_PAIRS]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        num_told = tell(publisher, num_told, rank)
    publisher.close()
    tell(publisher, num_told, rank)

    # For the comparison only: what the trainer would serve now, gathered whole, in a plain file.
    weights = {name: as_served(parameter) for name, parameter in model.named_parameters()}
    if rank == 0:
        (out / "trainer").mkdir()
        save_file(weights, out / "trainer" / "model.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def as_served(parameter: torch.Tensor) -> torch.Tensor:
    """The whole parameter in bf16; every rank must call this, since it gathers."""
    return parameter.full_tensor().detach().to(torch.bfloat16)


def tell(publisher: torch_delta.Publisher, num_told: int, rank: int) -> int:
    """Print the reports of versions committed since the last call; returns how many were printed in all."""
    reports = publisher.reports
    if rank == 0:
        for report in reports[num_told:]:
            print(json.dumps(asdict(report)), flush=True)
    return len(reports)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
