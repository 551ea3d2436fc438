"""Accelerate, with accumulation and a learning-rate schedule: `accelerate launch examples/accelerate_loop.py ...`.

Arguments: CHECKPOINT STREAM OUTPUT. The optimizer stays the object it was, so schedulers and Accelerate work as ever.
"""

import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, get_constant_schedule_with_warmup

import torch_delta
from tiny import batches, checkpoint

base, stream, output = sys.argv[1:]
accelerator = Accelerator(gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(checkpoint(base), dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
schedule = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=2)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
torch_delta.attach(optimizer, model, stream, base=base)  # the one line, on every rank

for tokens in batches(8, accelerator.process_index, accelerator.num_processes):
    with accelerator.accumulate(model):
        tokens = tokens.to(accelerator.device)  # noqa: PLW2901
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(output, state_dict=weights)
accelerator.end_training()
