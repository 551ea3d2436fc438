"""What capture adds to a full training step on one NVIDIA GPU, 1.2 billion parameters. Needs torch with CUDA.

    python benchmarks/gpu_capture.py                       # fp32 masters, batch 4 x 512 tokens
    python benchmarks/gpu_capture.py --dtype bf16 --repeats 9 --json out.json

One model and one AdamW (fused). Blocks of steps rotate over: bare; each capture mode collected at every step; each mode
collected at the last step of a block only. A block attaches anew, runs steps that are not timed, then steps timed by
device events around the whole step, collect included. Bytes over PCIe are those of the changes, counted. Medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path

import torch
from measure import machine, median_ratio, table
from torch import nn
from torch.nn import functional

from torch_delta.capture import Capture, CaptureConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = ("bare", "transient", "persistent", "transient, rare", "persistent, rare")


class Block(nn.Module):
    """A decoder layer with a gated feed-forward part."""

    def __init__(self, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, hidden // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, hidden))
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Embedding, layers, head; returns the loss of predicting the next token."""

    def __init__(self, hidden: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, 4 * hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Bench:
    """One model in training on `device`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        small = arguments.small
        hidden, layers, heads, vocabulary = (64, 2, 4, 512) if small else (2048, 16, 16, 32_000)
        dtype = DTYPES[arguments.dtype]
        # On the bf16 grid from the start, as a model loaded from a bf16 checkpoint is.
        self.model = Decoder(hidden, layers, heads, vocabulary).to(torch.bfloat16).to("cuda", dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.tokens = torch.randint(vocabulary, (4, 32 if small else 512), device="cuda")
        self.autocast = dtype == torch.float32
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()

    def block(self, variant: str, arguments: argparse.Namespace) -> tuple[float, int, int]:
        """Milliseconds per step, bytes of changes per collect, extra bytes of device memory at the peak."""
        mode, _, rare = variant.partition(", ")
        capture = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if mode != "bare":
            capture = Capture(self.optimizer, self.model, config=CaptureConfig(mode=mode))
        num_bytes, num_collects, elapsed_ms = 0, 0, 0.0
        for number in range(arguments.warm_up + arguments.block):
            if number == arguments.warm_up:
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            self.step()
            is_last = number in {arguments.warm_up - 1, arguments.warm_up + arguments.block - 1}
            if capture is not None and (not rare or is_last):
                collected = capture.collect()
                capture.commit(collected.token)
                if number >= arguments.warm_up:
                    num_collects += 1
                    num_bytes += sum(c.index.nbytes + c.old.nbytes + c.new.nbytes for c in collected.changes)
        end.record()
        torch.cuda.synchronize()
        elapsed_ms = start.elapsed_time(end)
        peak = torch.cuda.memory_allocated() - before
        if capture is not None:
            capture.close()
        return elapsed_ms / arguments.block, num_bytes // max(num_collects, 1), peak


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the parameters")
    parser.add_argument("--repeats", type=int, default=7, help="blocks per variant")
    parser.add_argument("--block", type=int, default=8, help="timed steps per block")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them, 1 or more")
    parser.add_argument("--small", action="store_true", help="a tiny model: does the script still run?")
    parser.add_argument("--json", type=Path, default=None, help="also write the raw samples to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("gpu_capture.py: no CUDA device here; nothing was measured")
    bench = Bench(arguments)
    for variant in VARIANTS:  # kernels are compiled, Adam has its state
        bench.block(variant, arguments)
    samples: dict[str, list[tuple[float, int, int]]] = {variant: [] for variant in VARIANTS}
    for repeat in range(arguments.repeats):
        shift = repeat % len(VARIANTS)
        for variant in VARIANTS[shift:] + VARIANTS[:shift]:
            samples[variant].append(bench.block(variant, arguments))
    bare = [ms for ms, _, _ in samples["bare"]]
    rows = []
    for variant, found in samples.items():
        times = [ms for ms, _, _ in found]
        row: list[object] = [variant, f"{statistics.median(times):.2f}", f"{min(times):.2f}-{max(times):.2f}"]
        row.append("-" if variant == "bare" else f"{100 * (median_ratio(times, bare) - 1):+.2f}%")
        row += [f"{statistics.median(size for _, size, _ in found):,.0f}", f"{found[-1][2] / 2**20:,.0f}"]
        rows.append(row)
    print({**machine(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}, file=sys.stderr)
    print(f"{bench.num_parameters:,} parameters, {arguments.dtype}\n")
    header = ["variant", "ms per step", "spread", "overhead", "bytes over PCIe per collect", "kept MiB"]
    print(table(header, rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"samples": samples, "parameters": bench.num_parameters}), "utf-8")


if __name__ == "__main__":
    main()
