"""What attach costs a training loop: step time and memory, per capture mode, for fp32 masters and bf16 params.

    python benchmarks/trainer_overhead.py                      # about 100M parameters, batch 4 x 512 tokens
    python benchmarks/trainer_overhead.py --dtypes bf16 --repeats 7 --json out.json

One process holds the same model three times: bare, attached in transient mode, attached in persistent mode, each with
its own AdamW. Blocks of a few steps rotate over them, and who goes first rotates too. Every attached step publishes a
version to a directory, with the default durability and checksums on.

- *full step*: forward, backward, step. The seconds of a block include waiting for its last version, so that all
  background work (encoding, writing, committing) is charged to the loop.
- *optimizer only*: fixed gradients, only `optimizer.step()` is timed, the background is idle: what capture itself adds.
- *memory*, each in a process of its own: resident bytes that stay (before attach -> attached and at rest), and the peak
  of one more step above that. fp32 masters compute under bf16 autocast, as mixed-precision training does.

For processors without bf16 instructions, where a bf16 pass of this size takes minutes: `--no-autocast` computes fp32
masters in fp32, `--optimizer-only` makes the gradients by hand and leaves the full step out.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import Samples, machine, median_ratio, table

import torch_delta
from torch_delta.capture import kernels as capture_kernels
from torch_delta.codec import kernels
from torch_delta.codec.compiling import Kernel
from torch_delta.codec.packed import kernels as packed_kernels
from torch_delta.codec.packed import kernels_gather, kernels_locate, kernels_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIANTS = ("bare", "transient", "persistent")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of the model and of a batch."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 32_000
    batch: int = 4
    tokens: int = 512


SMALL = Size(hidden=64, layers=2, heads=4, vocabulary=512, batch=2, tokens=16)


class Trainer:
    """A Qwen3-shaped model with AdamW, bare or attached.

    Args:
        variant: "bare" or a capture mode.
        dtype: of the parameters; fp32 ones compute under bf16 autocast.
        size: of model and batch.
        work: empty folder for base checkpoint and stream.
        fused: which AdamW implementation.
        autocast: whether fp32 parameters compute in bf16.
    """

    def __init__(
        self, variant: str, dtype: torch.dtype, size: Size, work: Path, *, fused: bool, autocast: bool = True
    ) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.manual_seed(0)
        config = Qwen3Config(
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 4 or 1,
            head_dim=size.hidden // size.heads,
            vocab_size=size.vocabulary,
            tie_word_embeddings=True,
        )
        self.variant = variant
        self.work = work
        self.autocast = autocast and dtype == torch.float32
        # On the bf16 grid from the start, as a model loaded from a bf16 checkpoint is.
        self.model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        self.model.save_pretrained(work / "base")
        self.model = self.model.to(dtype)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=fused, foreach=not fused)
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.tokens))
        self.publisher = None

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def attach(self) -> None:
        """Attach in this variant's mode; does nothing for the bare one."""
        if self.variant != "bare":
            self.publisher = torch_delta.attach(
                self.optimizer, self.model, str(self.work / "stream"), base=str(self.work / "base"), mode=self.variant
            )

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()

    def make_gradients(self) -> None:
        """Gradients as large as those of a step, the same for every variant, without a pass through the model."""
        generator = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters():
            parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    def step(self) -> float:
        """Seconds of one optimizer step."""
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    def make_state(self) -> None:
        """Let Adam make its state without moving a weight, so that the model still is its base."""
        self.make_gradients()
        (group,) = self.optimizer.param_groups
        rate, group["lr"] = group["lr"], 0.0
        self.optimizer.step()
        group["lr"] = rate

    def drain(self) -> None:
        """Wait until every version of the steps so far is committed."""
        if self.publisher is not None:
            self.publisher.wait()

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()


def make(variant: str, dtype: str, size: Size, work: Path, arguments: argparse.Namespace) -> Trainer:
    """A trainer as the command line asks for it."""
    return Trainer(variant, DTYPES[dtype], size, work, fused=not arguments.foreach, autocast=not arguments.no_autocast)


@dataclass
class Times:
    """Seconds per step of one variant."""

    full: Samples = field(default_factory=Samples)
    full_step_call: Samples = field(default_factory=Samples)
    optimizer_only: Samples = field(default_factory=Samples)


def measure_times(dtype: str, arguments: argparse.Namespace) -> tuple[dict[str, Times], int]:
    """Rotate blocks of steps over the variants; also the number of parameters."""
    times = {variant: Times() for variant in VARIANTS}
    size = SMALL if arguments.small else Size()
    with _folder(arguments.work) as work, contextlib.ExitStack() as stack:
        trainers = []
        for variant in VARIANTS:
            (work / variant).mkdir()
            trainers.append(make(variant, dtype, size, work / variant, arguments))
            trainers[-1].attach()
            stack.callback(trainers[-1].close)
        if not arguments.small:
            compile_kernels()
        for trainer in trainers:  # make Adam state
            for _ in range(2):
                trainer.make_gradients() if arguments.optimizer_only else trainer.backward()
                trainer.step()
            trainer.drain()
        for repeat in range(0 if arguments.optimizer_only else arguments.repeats):
            for trainer in _rotated(trainers, repeat):
                os.sync()
                step_s = 0.0
                start = time.perf_counter()
                for _ in range(arguments.block):
                    trainer.backward()
                    step_s += trainer.step()
                trainer.drain()
                times[trainer.variant].full.seconds.append((time.perf_counter() - start) / arguments.block)
                times[trainer.variant].full_step_call.seconds.append(step_s / arguments.block)
        for repeat in range(3 * arguments.repeats):
            for trainer in _rotated(trainers, repeat):
                os.sync()
                times[trainer.variant].optimizer_only.seconds.append(trainer.step())
                trainer.drain()
        return times, trainers[0].num_parameters


def _rotated(trainers: list[Trainer], repeat: int) -> list[Trainer]:
    shift = repeat % len(trainers)
    return trainers[shift:] + trainers[:shift]


def probe_memory(variant: str, dtype: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Resident and peak bytes of one variant; meant to run alone in a fresh process (Linux)."""
    with _folder(arguments.work) as work:
        # A small run first, and all kernels: libraries and compiled code are not what a parameter costs.
        if variant != "bare" and not arguments.small:
            compile_kernels()
        (work / "small").mkdir()
        small = make(variant, dtype, SMALL, work / "small", arguments)
        small.attach()
        for _ in range(3):
            small.backward()
            small.step()
            small.drain()
        small.close()
        (work / "full").mkdir()
        size = SMALL if arguments.small else Size()
        trainer = make(variant, dtype, size, work / "full", arguments)
        trainer.make_state()
        before = _resident_bytes()
        trainer.attach()
        for _ in range(2):
            trainer.step()
            trainer.drain()
        steady = _resident_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
        trainer.step()
        trainer.drain()
        peak = _status_bytes("VmHWM")
        trainer.close()
        return {
            "steady_bytes": steady - before,
            "peak_step_bytes": peak - steady,
            "num_parameters": trainer.num_parameters,
        }


def compile_kernels() -> None:
    """Compile every hot loop now; otherwise that happens once enough work has come by."""
    for module in (kernels, packed_kernels, kernels_streams, kernels_gather, kernels_locate, capture_kernels):
        for value in vars(module).values():
            for kernel in value.values() if isinstance(value, dict) else (value,):
                if isinstance(kernel, Kernel):
                    kernel.compile()


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}; the memory probe needs Linux")


def measure_memory(dtype: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Probe every variant in a fresh process."""
    found = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--probe-memory", variant, "--dtypes", dtype]
        command += ["--small"] * arguments.small + ["--foreach"] * arguments.foreach
        command += ["--no-autocast"] * arguments.no_autocast
        command += [] if arguments.work is None else ["--work", str(arguments.work)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[variant] = json.loads(run.stdout.splitlines()[-1])
    return found


def report(dtype: str, times: dict[str, Times], memory: dict[str, dict[str, float]]) -> str:
    """The Markdown table of one dtype."""
    bare = times["bare"]
    header = [dtype, "full step ms", "overhead", "in step() ms", "step() only ms", "added ms"]
    header += ["steady B/param", "peak of a step MiB"]
    rows = []
    for variant in VARIANTS:
        mine, bytes_of = times[variant], memory.get(variant)
        added = statistics.median(
            a - b for a, b in zip(mine.optimizer_only.seconds, bare.optimizer_only.seconds, strict=True)
        )
        row: list[object] = [variant, *_full_step(mine, bare)]
        row.append(f"{1e3 * mine.optimizer_only.median_s:.0f}")
        row.append("-" if variant == "bare" else f"{1e3 * added:+.0f}")
        if bytes_of is None:
            row += ["-", "-"]
        else:
            row.append(f"{bytes_of['steady_bytes'] / bytes_of['num_parameters']:.2f}")
            row.append(f"{bytes_of['peak_step_bytes'] / 2**20:.0f}")
        rows.append(row)
    return table(header, rows)


def _full_step(mine: Times, bare: Times) -> list[str]:
    """Milliseconds of a step, what it takes longer than the bare one, and milliseconds of `step()` in it."""
    if not mine.full.seconds:
        return ["-", "-", "-"]
    overhead = median_ratio(mine.full.seconds, bare.full.seconds) - 1
    shown = "-" if mine is bare else f"{100 * overhead:+.1f}%"
    return [f"{1e3 * mine.full.median_s:.0f}", shown, f"{1e3 * mine.full_step_call.median_s:.0f}"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=5, help="blocks per variant")
    parser.add_argument("--block", type=int, default=2, help="full steps per block")
    parser.add_argument("--foreach", action="store_true", help="AdamW(foreach=True) instead of fused")
    parser.add_argument("--no-autocast", action="store_true", help="fp32 parameters compute in fp32")
    parser.add_argument("--optimizer-only", action="store_true", help="leave the full step out")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory probes out")
    parser.add_argument("--work", type=Path, default=None, help="folder for streams (default: temporary)")
    parser.add_argument("--small", action="store_true", help="a tiny model: does the script still run?")
    parser.add_argument("--json", type=Path, default=None, help="also write the raw samples to this file")
    parser.add_argument("--probe-memory", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.probe_memory is not None:
        print(json.dumps(probe_memory(arguments.probe_memory, arguments.dtypes[0], arguments)))
        return
    facts = machine()
    print(f"machine: {facts}, {torch.get_num_threads()} torch threads", file=sys.stderr)
    raw: dict[str, object] = {"command": " ".join(["trainer_overhead.py", *sys.argv[1:]]), "machine": facts}
    for dtype in arguments.dtypes:
        memory = {} if arguments.no_memory else measure_memory(dtype, arguments)
        times, num_parameters = measure_times(dtype, arguments)
        print(f"{num_parameters / 1e6:.1f}M parameters, {dtype}\n\n{report(dtype, times, memory)}\n")
        raw[dtype] = {
            "num_parameters": num_parameters,
            "memory": memory,
            "times_s": {variant: {k: v.seconds for k, v in vars(t).items()} for variant, t in times.items()},
        }
    raw["load_1min_after"] = machine()["load_1min"]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="trainer-overhead-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
