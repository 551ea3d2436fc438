"""From weights in GPU memory to an encoded part: how fast, and how many bytes cross PCIe. Needs torch with CUDA.

    python benchmarks/gpu_encode.py                        # 1 GiB of bf16 bits, fp32 masters and bf16 weights
    python benchmarks/gpu_encode.py --gib 4 --repeats 15 --json out.json

Timed by device events after a warm-up, medians: finding and compacting the changes with the Triton kernels and with
torch's operations (both move the copy along, which is put back between repeats, not timed), and the copy of what was
found to the host. Encoding it there is timed by the host's clock. GB/s count bf16 bytes of the full tensor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import machine, table

from torch_delta.capture import arrays, sweep, triton_sweep
from torch_delta.codec import encode_changes
from torch_delta.codec.change import Change
from torch_delta.format.box import Box
from torch_delta.format.schema import Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def device_ms(work: Callable[[], object]) -> tuple[float, object]:
    """Milliseconds between two events around `work`, and what it returned."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    result = work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), result


def by_triton(before: torch.Tensor, weights: torch.Tensor) -> Found:
    found = triton_sweep.sweep_on_device(before, weights)
    if found is None:
        raise SystemExit("gpu_encode.py: Triton is missing, or this device's cast keeps NaN payloads")
    return found


def by_torch(before: torch.Tensor, weights: torch.Tensor) -> Found:
    return sweep.sweep(before, arrays.to_bits(weights, torch.bfloat16))


WAYS = {"triton": by_triton, "torch": by_torch}


def encode(found: Found, rows: int) -> tuple[float, int]:
    """Seconds on the host, one thread, and stored bytes of the frames."""
    index, old, new = found
    schema = Schema((TensorSpec("weight", "BF16", (rows, 4096)),))
    box = Box.whole((rows, 4096))
    positions = index.numpy().view("u4") if index.dtype == torch.int32 else index.numpy()
    change = Change(tensor=0, box=box, index=positions, old=arrays.host(old), new=arrays.host(new))
    started = time.perf_counter()
    encoded = encode_changes(schema, [change])
    seconds = time.perf_counter() - started
    return seconds, sum(memoryview(data).nbytes for payload in encoded.payloads for data in payload.values())


def measure(dtype: torch.dtype, density: float, arguments: argparse.Namespace) -> list[dict[str, object]]:
    rows = arguments.gib * 2**29 // 4096 if not arguments.small else 64
    weights = (torch.randn(rows * 4096, device="cuda") * 0.02).to(torch.bfloat16)
    kept = arrays.to_bits(weights, torch.bfloat16).clone()
    kept[torch.rand(kept.numel(), device="cuda") < density] ^= 1
    weights = weights.to(dtype)
    results: list[dict[str, object]] = []
    for name, way in WAYS.items():
        find, copy, host = [], [], []
        stored = crossed = 0
        for repeat in range(arguments.repeats + 2):
            before = kept.clone()
            find_ms, found = device_ms(lambda w=way, b=before: w(b, weights))
            copy_ms, on_host = device_ms(lambda f=found: tuple(column.cpu() for column in f))
            encode_s, stored = encode(on_host, rows)
            crossed = sum(column.numel() * column.element_size() for column in on_host)
            if repeat >= 2:  # kernels are compiled, memory is there
                find.append(find_ms)
                copy.append(copy_ms)
                host.append(encode_s)
        total_gb = 2 * rows * 4096 / 1e9
        results.append(
            {
                "way": name,
                "dtype": str(dtype).removeprefix("torch."),
                "density": density,
                "find_ms": statistics.median(find),
                "find_gb_per_s": total_gb / (statistics.median(find) / 1e3),
                "copy_ms": statistics.median(copy),
                "pcie_bytes": crossed,
                "full_bytes": 2 * rows * 4096,
                "host_encode_s": statistics.median(host),
                "stored_bytes": stored,
            }
        )
    return results


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gib", type=int, default=1, help="bf16 bytes of the tensor")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.003, 0.01, 0.05])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a tiny tensor: does the script still run?")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("gpu_encode.py: no CUDA device here; nothing was measured")
    results = [
        row
        for dtype in (torch.float32, torch.bfloat16)
        for density in arguments.densities
        for row in measure(dtype, density, arguments)
    ]
    print({**machine(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}, file=sys.stderr)
    rows = [
        [
            f"{row['way']}, {row['dtype']}, {row['density']:.1%}",
            f"{row['find_ms']:.2f}",
            f"{row['find_gb_per_s']:.0f}",
            f"{row['copy_ms']:.2f}",
            f"{row['pcie_bytes']:,}",
            f"{row['pcie_bytes'] / row['full_bytes']:.2%}",
            f"{1e3 * row['host_encode_s']:.0f}",
            f"{row['stored_bytes']:,}",
        ]
        for row in results
    ]
    header = ["way, weights, changed", "find ms", "GB/s of bf16", "copy ms", "PCIe bytes", "of full", "host encode ms"]
    print(table([*header, "stored bytes"], rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
