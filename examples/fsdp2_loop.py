"""FSDP2, every rank a sender: `torchrun --nproc-per-node 2 examples/fsdp2_loop.py CHECKPOINT STREAM OUTPUT`.

Nothing is gathered to publish: each rank uploads what changed in the shards it owns.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import torch_delta
from tiny import batches, checkpoint

base, stream, output = sys.argv[1:]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(checkpoint(base), dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
torch_delta.attach(optimizer, model, stream, base=base)  # the one line, on every rank

for tokens in batches(4, dist.get_rank(), dist.get_world_size()):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    model.save_pretrained(output, state_dict=weights)
dist.barrier()
dist.destroy_process_group()
