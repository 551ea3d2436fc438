"""Change detection beside memcpy, on one thread, in one interleaved run.

    python benchmarks/changes.py                       # 64 MiB of bf16 bits, 9 repeats
    python benchmarks/changes.py --mib 256 --repeats 15

Compared: `torch_delta.codec.diff` as it is installed (compiled), its numpy reference, the fused cast of fp32 masters
and comparison, what capture does (the same, and it takes old and new bits and moves its copy along, so that every call
sees the changes of the one before undone), and plain numpy and torch. Speeds count the bytes of one side; memcpy reads
and writes as many.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from measure import Samples, machine, median_ratio, table, timed

from torch_delta.capture.kernels import SWEEP, SWEEP_MASTERS
from torch_delta.capture.sweep import sweep, sweep_masters
from torch_delta.codec import diff as module
from torch_delta.codec.diff import diff, diff_bf16
from torch_delta.codec.kernels import CHANGED, ROUND_BF16

if TYPE_CHECKING:
    from collections.abc import Callable


def reference(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What `diff` does without numba."""
    step = module._CHUNK
    pieces = range(0, old.size, step)
    return np.concatenate([module._changed_numpy(old[at : at + step], new[at : at + step]) + at for at in pieces])


def contenders(old: np.ndarray, new: np.ndarray) -> dict[str, Callable[[], object]]:
    a, b = torch.from_numpy(old.view(np.int16)), torch.from_numpy(new.view(np.int16))
    master = new.astype(np.uint32) << np.uint32(16)
    turns = itertools.cycle((b, a))
    masters = [torch.from_numpy(bits.astype(np.uint32) << np.uint32(16)).view(torch.float32) for bits in (new, old)]
    wide_turns = itertools.cycle(masters)
    copies = [a.clone(), a.clone()]
    return {
        "memcpy": old.copy,
        "diff, compiled": lambda: diff(old, new),
        "diff, numpy": lambda: reference(old, new),
        "diff_bf16, compiled (bytes of bf16)": lambda: diff_bf16(master, old, nan_bits=0x7FC0),
        "capture sweep, bf16": lambda: sweep(copies[0], next(turns))[0],
        "capture sweep, fp32 masters (bytes of bf16)": lambda: sweep_masters(copies[1], next(wide_turns))[0],
        "numpy flatnonzero(a != b)": lambda: np.flatnonzero(old != new),
        "torch (a != b).nonzero()": lambda: torch.ne(a, b).nonzero(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="bytes of bf16 bits on each side")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for kernel in (CHANGED[2], ROUND_BF16, SWEEP[2], SWEEP_MASTERS):
        kernel.compile()
    rng = np.random.default_rng(0)
    # Bits of finite numbers only, so that no master is a NaN and all contenders find the same elements.
    old = rng.integers(0, 0x7F80, options.mib << 19, dtype=np.uint16)
    shares = (0.001, 0.003, 0.01, 0.05)
    columns: dict[str, list[str]] = {}
    speeds: list[str] = []
    for share in shares:
        new = old.copy()
        new[rng.random(old.size) < share] ^= 1
        work = contenders(old, new)
        samples = {name: Samples() for name in work}
        exact = [name for name in work if "diff," in name or "sweep," in name]
        found = {name: np.asarray(work[name]()).reshape(-1).size for name in exact}
        assert len(set(found.values())) == 1, found
        names = list(work)
        for repeat in range(options.repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                samples[name].seconds.append(timed(work[name], flush=False))
        base = samples["memcpy"]
        speeds.append(f"{old.nbytes / base.median_s / 1e9:.1f} GB/s")
        for name, item in samples.items():
            columns.setdefault(name, []).append(f"{median_ratio(base.seconds, item.seconds):.2f}")
    columns["memcpy"] = speeds
    print(machine(), "\n")
    print(
        table(
            ["of memcpy's speed", *(f"{share:.1%} changed" for share in shares)], [[k, *v] for k, v in columns.items()]
        )
    )


if __name__ == "__main__":
    main()
