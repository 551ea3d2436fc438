"""The plain loop on one process: `python examples/plain_loop.py CHECKPOINT STREAM OUTPUT`.

Follow it while it runs, or later: `torch-delta follow STREAM COPY --base CHECKPOINT`.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import torch_delta
from tiny import batches, checkpoint

base, stream, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(checkpoint(base), dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
torch_delta.attach(optimizer, model, stream, base=base)  # the one line

for tokens in batches(4):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")

model.save_pretrained(output)
