"""The pause: what happens between stopping a vLLM engine and letting it go on, by three ways of changing its weights.

    python benchmarks/pause.py                       # 494M parameters (Qwen2-0.5B), 0.1%, 1% and 5% changed, 7 repeats
    python benchmarks/pause.py --sizes 0.1B 0.5B 1.5B --changed 1000000       # our pause alone, over model sizes
    python benchmarks/pause.py --small --repeats 2   # does the script still run, both parts of it?

Everything runs on one live model in this process, which vLLM built on CPU with our backend selected (so that weights
are not repacked, without which vLLM's own patch loader has no effect on some hosts). The same delta is applied by

- torch_delta: `LiveModel.write` of a plan, which compares old bits, keeps an undo log and reads every value back. The
  plan is made before the pause and timed apart; the agreement between ranks is not in it (one rank).
- vLLM's `load_checkpoint_weight_patches`, as shipped, from tensors in memory.
- vLLM's layerwise reload of all weights (what SkyRL's engine does), from tensors in memory.

A repeat runs each once, in an order that rotates; after each, weights go back to the base. That all three lead to the
same bits is checked in a first, untimed pass, in which the peak of resident memory is taken too.

Beside them, in every repeat, what memory allows (`cache_lines.py`): the time of reading and writing one word of each
cache line that the delta touches, and of copying the model once. That time over the reload's is the smallest ratio that
any sparse write could have on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cache_lines import PER_LINE, Memory, lines_of
from measure import Samples, machine
from pause_report import METHODS, report_comparison, report_memory, report_sizes

from torch_delta.format.box import Box
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.receive.patches import Patch, PatchSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


@dataclass(frozen=True)
class Shape:
    """A model of the Qwen2 family."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int = 151936


SHAPES = {
    "0.1B": Shape(hidden=512, layers=12, heads=8, kv_heads=2, inner=2048),
    "0.5B": Shape(hidden=896, layers=24, heads=14, kv_heads=2, inner=4864),
    "1.5B": Shape(hidden=1536, layers=28, heads=12, kv_heads=2, inner=8960),
    "small": Shape(hidden=128, layers=2, heads=4, kv_heads=2, inner=192, vocab=512),
    "smaller": Shape(hidden=64, layers=2, heads=2, kv_heads=1, inner=128, vocab=512),
}


@dataclass
class Delta:
    """New values of some elements, in checkpoint coordinates: name -> (flat indices, bf16 bits)."""

    changes: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def count(self) -> int:
        return sum(index.size for index, _ in self.changes.values())

    def lines(self, schema: Schema) -> np.ndarray:
        """Cache lines it touches, in a buffer that holds all tensors one after the other, each from a line's start."""
        found, at = [], 0
        for spec in schema.tensors:
            index, _ = self.changes.get(spec.name, (np.empty(0, np.int64), None))
            found.append(at + lines_of(index))
            at += -(-spec.numel // PER_LINE)
        return np.concatenate(found)

    def patch(self, schema: Schema) -> Patch:
        """As it comes out of a LocalCheckpoint."""
        slices = {}
        for name, (index, value) in self.changes.items():
            box = Box.whole(schema.by_name[name].shape)
            slices[schema.index(name)] = (PatchSlice(box, index.astype(np.uint32), value),)
        return Patch(1, self.count, slices, {})  # the increments are the engine's business, before the pause

    def tensors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """name -> (indices, values) as torch tensors."""
        return {
            name: (torch.from_numpy(index.astype(np.int32)), torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
            for name, (index, bits) in self.changes.items()
        }


class Served:
    """A live vLLM model with random weights, and its routing table."""

    def __init__(self, shape: Shape, work: Path) -> None:
        from transformers import AutoModelForCausalLM, Qwen2Config
        from vllm import LLM
        from vllm.config import set_current_vllm_config

        config = Qwen2Config(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.inner,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
            dtype="bfloat16",
        )
        with torch.device("meta"):
            names = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_parameters())
        specs = [TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in sorted(names.items())]
        self.schema = Schema(tuple(specs))
        folder = Path(tempfile.mkdtemp(dir=work))
        config.save_pretrained(folder)
        self.llm: Any = LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
            weight_transfer_config={"backend": "torch_delta"},
        )
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.model: torch.nn.Module = worker.get_model()
        self.config: Any = self.llm.llm_engine.vllm_config
        self.context = lambda: set_current_vllm_config(self.config)
        self.live: Any = None

    def probe(self) -> None:
        """Make the routing table."""
        from torch_delta.vllm.routing import LiveModel

        self.live = LiveModel.probe(self.model, self.schema, context=self.context)
        self.live.settle([self.live.reach], 0)
        if self.live.unrouted:
            raise SystemExit(f"not routed: {dict(self.live.unrouted)}")

    @property
    def num_parameters(self) -> int:
        return sum(spec.numel for spec in self.schema.tensors)

    @property
    def num_lines(self) -> int:
        return sum(-(-spec.numel // PER_LINE) for spec in self.schema.tensors)

    def delta(self, fraction: float, seed: int) -> Delta:
        """About `fraction` of every tensor."""
        rng = np.random.default_rng(seed)
        changes = {}
        for spec in self.schema.tensors:
            hit = np.flatnonzero(rng.random(spec.numel, dtype=np.float32) < fraction)
            if hit.size:
                changes[spec.name] = (hit, _random_bits(rng, hit.size))
        return Delta(changes)


def _random_bits(rng: np.random.Generator, count: int) -> np.ndarray:
    values = 0.02 * rng.standard_normal(count, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


class Contest:
    """The three ways on one model, and back."""

    def __init__(self, served: Served) -> None:
        self.served = served
        rng = np.random.default_rng(0)
        self.base = {
            spec.name: torch.from_numpy(_random_bits(rng, spec.numel).view(np.int16))
            .view(torch.bfloat16)
            .view(spec.shape)
            for spec in served.schema.tensors
        }
        with served.context():
            served.model.load_weights(iter(self.base.items()))
        served.live.forget()

    def methods(self, delta: Delta) -> dict[str, Callable[[], tuple[float, float]]]:
        """Each way: brings the base to the delta; seconds before the pause, and inside it."""
        there = delta.tensors()
        full = {name: tensor.clone() for name, tensor in self.base.items()}
        for name, (index, value) in there.items():
            full[name].view(-1)[index.long()] = value
        patch = delta.patch(self.served.schema)

        def ours() -> tuple[float, float]:
            started = time.perf_counter()
            plan = self.served.live.plan([patch])
            planned = time.perf_counter()
            self.served.live.write(plan)
            return planned - started, time.perf_counter() - planned

        def loader() -> tuple[float, float]:
            started = time.perf_counter()
            self._load_patches(there)
            return 0.0, time.perf_counter() - started

        def layerwise() -> tuple[float, float]:
            started = time.perf_counter()
            self._reload(full)
            return 0.0, time.perf_counter() - started

        return dict(zip(METHODS, (ours, loader, layerwise), strict=True))

    def back(self, delta: Delta) -> None:
        """To the base again, by our own way, which is the fastest; untimed, and checked in the first pass."""
        old = {
            name: (index, self.base[name].view(-1).view(torch.int16).numpy().view(np.uint16)[index])
            for name, (index, _) in delta.changes.items()
        }
        live = self.served.live
        live.forget()
        live.write(live.plan([Delta(old).patch(self.served.schema)]))

    def _load_patches(self, changes: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        by_name = self.served.schema.by_name
        patches = [
            CheckpointWeightPatch(name, by_name[name].shape, torch.bfloat16, value, index)
            for name, (index, value) in changes.items()
        ]
        with self.served.context():
            load_checkpoint_weight_patches(self.served.model, patches)

    def _reload(self, full: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with self.served.context(), torch.device("cpu"), torch.no_grad():
            initialize_layerwise_reload(self.served.model)
            self.served.model.load_weights(iter(full.items()))
            finalize_layerwise_reload(self.served.model, self.served.config.model_config)


def compare(served: Served, fractions: list[float], repeats: int) -> list[dict[str, Any]]:
    """All methods at every fraction."""
    served.probe()
    contest = Contest(served)
    memory = Memory(PER_LINE * served.num_lines, torch.get_num_threads())
    at_base = served.live.digest()
    found = []
    for fraction in fractions:
        delta = served.delta(fraction, seed=int(1e6 * fraction))
        methods = contest.methods(delta)
        peaks, reached = {}, {}
        for name, method in methods.items():
            with peak_bytes() as peak:
                method()
            peaks[name] = peak[0]
            served.live.forget()
            reached[name] = served.live.digest()
            contest.back(delta)
            if served.live.digest() != at_base:
                raise SystemExit(f"after {name}, the way back did not lead to the base")
        if any(digest != reached[METHODS[0]] or digest == at_base for digest in reached.values()):
            raise SystemExit(f"the methods do not lead to the same bits at {fraction:.1%}")
        before = {name: Samples() for name in METHODS}
        inside = {name: Samples() for name in METHODS}
        lines = delta.lines(served.schema)
        touching, copying = Samples(), Samples()
        for repeat in range(repeats):
            for name in _rotated(list(METHODS), repeat):
                outside_s, pause_s = methods[name]()
                before[name].seconds.append(outside_s)
                inside[name].seconds.append(pause_s)
                contest.back(delta)
            touching.seconds.append(memory.touch_s(lines))
            copying.seconds.append(memory.copy_s())
        found.append(
            {
                "fraction": fraction,
                "changed": delta.count,
                "pause_s": {name: samples.seconds for name, samples in inside.items()},
                "plan_s": before[METHODS[0]].seconds,
                "peak_bytes": peaks,
                "num_lines": int(lines.size),
                "lines_share": lines.size / served.num_lines,
                "touch_s": touching.seconds,
                "copy_s": copying.seconds,
            }
        )
    return found


def over_sizes(sizes: list[str], num_changed: int, repeats: int, work: Path) -> list[dict[str, Any]]:
    """Our pause at a fixed number of changed elements, models of different sizes taking turns."""
    models = {size: Served(SHAPES[size], work) for size in sizes}
    for served in models.values():
        served.probe()
    deltas = {size: served.delta(num_changed / served.num_parameters, seed=1) for size, served in models.items()}
    pauses = {size: Samples() for size in sizes}
    plans = {size: Samples() for size in sizes}
    peaks: dict[str, int] = {}
    for repeat in range(-1, repeats):  # the first is for memory, untimed
        for size in _rotated(sizes, repeat):
            live = models[size].live
            started = time.perf_counter()
            plan = live.plan([deltas[size].patch(models[size].schema)])
            planned_s = time.perf_counter() - started
            with peak_bytes() if repeat < 0 else contextlib.nullcontext([0]) as peak:
                started = time.perf_counter()
                undo = live.write(plan)
                pause_s = time.perf_counter() - started
            live.rollback(undo)
            if repeat < 0:
                peaks[size] = peak[0]
            else:
                plans[size].seconds.append(planned_s)
                pauses[size].seconds.append(pause_s)
    return [
        {
            "size": size,
            "num_parameters": models[size].num_parameters,
            "changed": deltas[size].count,
            "pause_s": pauses[size].seconds,
            "plan_s": plans[size].seconds,
            "peak_bytes": peaks[size],
        }
        for size in sizes
    ]


@contextlib.contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """How far resident memory rises above where it stood, at most, while the block runs (Linux)."""
    found = [0]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what an earlier pass gave back to the allocator would be taken for nothing
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    try:
        yield found
    finally:
        found[0] = max(0, _status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {key}; this needs Linux")


def _rotated(items: list[str], repeat: int) -> list[str]:
    shift = repeat % len(items)
    return items[shift:] + items[:shift]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="0.5B", help="for the comparison")
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.001, 0.01, 0.05])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SHAPES), help="our pause over these models instead")
    parser.add_argument("--changed", type=int, default=1_000_000, help="elements changed, with --sizes")
    parser.add_argument("--small", action="store_true", help="tiny models: does the script still run?")
    parser.add_argument("--work", type=Path, default=None, help="folder for configurations (default: temporary)")
    parser.add_argument("--json", type=Path, default=None, help="also write the raw samples to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    for name, value in ENVIRONMENT.items():  # read when vLLM is imported
        os.environ.setdefault(name, value)
    facts = machine()
    print(f"machine: {facts}, {torch.get_num_threads()} torch threads", file=sys.stderr)
    raw: dict[str, object] = {"command": " ".join(["pause.py", *sys.argv[1:]]), "machine": facts}
    work = Path(tempfile.mkdtemp(prefix="pause-", dir=arguments.work))
    try:
        if arguments.sizes or arguments.small:
            sizes = ["smaller", "small"] if arguments.small else arguments.sizes
            changed = min(arguments.changed, 2000) if arguments.small else arguments.changed
            raw["sizes"] = rows = over_sizes(sizes, changed, arguments.repeats, work)
            print(report_sizes(rows))
        if arguments.small or not arguments.sizes:
            served = Served(SHAPES["small" if arguments.small else arguments.model], work)
            raw["comparison"] = rows = compare(served, arguments.fractions, arguments.repeats)
            raw["num_parameters"] = served.num_parameters
            print(
                f"{served.num_parameters / 1e6:.0f}M parameters\n\n{report_comparison(rows)}\n\n{report_memory(rows)}"
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    raw["load_1min_after"] = machine()["load_1min"]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(raw, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
