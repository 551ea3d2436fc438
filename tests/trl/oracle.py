"""What must be served: the trainer's weights, as transformers and a fresh engine say. Nothing here is torch_delta's."""

from __future__ import annotations

import copy
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.engines import Engine
    from tests.vllm.servers import Server

Bits = dict[str, np.ndarray]

PROMPTS = ([2, 22, 4, 28, 3], [2, 5, 3])
NUM_TOKENS = 12
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def served_bits(model: torch.nn.Module) -> Bits:
    """The weights as they are served: bf16, nearest even, as bits; by name. A collective where they are sharded."""
    found = {}
    for name, tensor in model.state_dict().items():
        values = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = values.detach().to(torch.bfloat16).view(torch.int16).cpu().numpy().copy()
    return found


def merged_bits(model: Any) -> Bits:
    """The same of a model with adapters: what PEFT makes of a copy of it."""
    return served_bits(copy.deepcopy(model).merge_and_unload())


def same(ours: Bits, theirs: Bits) -> bool:
    """Whether two sets of weights agree in every bit."""
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def greedy(server: Server) -> list[list[int]]:
    """What a server says."""
    return ask(server.url)


def ask(url: str) -> list[list[int]]:
    """The same, by address."""
    with _opener.open(f"{url}/v1/models", timeout=30) as answer:
        name = json.load(answer)["data"][0]["id"]
    body = {
        "model": name,
        "prompt": [list(prompt) for prompt in PROMPTS],
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode(), headers=headers)
    with _opener.open(request, timeout=60) as answer:
        choices = json.load(answer)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def weight_version(server: Server) -> str:
    """What a server says its weights are."""
    return server.get("/weight_info")[1]["weight_version"]


def write_served(model: Path, folder: Path, bits: Bits) -> Path:
    """A checkpoint with these weights, written by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.load_state_dict({name: torch.from_numpy(value).view(torch.bfloat16) for name, value in bits.items()})
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def fresh_greedy(folder: Path) -> list[list[int]]:
    """What an engine says that was just started from a checkpoint."""
    with fresh_engine(folder) as engine:
        return say(engine)


def fresh_engine(folder: Path) -> Engine:
    """An engine of this process that was just started from a checkpoint."""
    from tests.vllm.engines import Engine

    return Engine(folder, delta=True)


def say(engine: Engine) -> list[list[int]]:
    """What an engine of this process says."""
    return engine.greedy(PROMPTS, num_tokens=NUM_TOKENS)


def pulled(stream: Path, version: int, folder: Path, base: Path) -> Bits:
    """A version as a checkpoint on disk, read by safetensors."""
    from safetensors.torch import load_file

    import torch_delta

    torch_delta.pull(str(stream), folder, version=version, base=str(base))
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return {name: value.view(torch.int16).numpy() for name, value in weights.items()}


def after_sync(trainer: Any, see: Any) -> None:
    """Call `see(step, model)` at the end of every step, after the trainer's own synchronisation of that step."""
    from transformers import TrainerCallback

    class Witness(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            see(state.global_step, kwargs["model"])

    trainer.add_callback(Witness())
