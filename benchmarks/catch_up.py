"""Catching up: a receiver that was away takes many versions in one step, next to one by one.

    python benchmarks/catch_up.py                                # 50 versions of 1% of 64 Mi bf16 elements
    python benchmarks/catch_up.py --versions 50 --density 0.003 --repeats 7 --json out.json

One stream is published once: every version changes other elements. Then every repeat copies the base twice and brings
one copy to the newest version in one merged step and the other version by version; who goes first swaps. Both copies
are verified in full against the trainer's digests, outside the time. A third column takes the versions one by one
without fsync, to show what part of the difference is the disk.

Bytes at rest are counted too: what each way writes to patches is the redo log that would be replayed after a power cut.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from measure import Samples, machine, median_ratio, table, timed
from safetensors.torch import save_file

from torch_delta import Follower, LocalCheckpoint, PublishConfig, TensorSource, attach_source
from torch_delta.publish.base import open_base

_MERGED, _SINGLE, _UNSYNCED = "merged", "one by one", "one by one, no fsync"


def publish(work: Path, *, elements: int, versions: int, density: float) -> tuple[Path, Path]:
    """A base and a stream of `versions` versions."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, elements // 4 // 1024)
    weights = {
        f"layer.{number}.weight": torch.randn((rows, 1024), generator=generator).to(torch.bfloat16)
        for number in range(4)
    }
    base, stream = work / "base", work / "stream"
    base.mkdir()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    source = TensorSource(weights.items, open_base(base).schema)
    with attach_source(source, stream, base=base, config=PublishConfig(anchor_share=None)) as publisher:
        for _ in range(versions):
            for tensor in weights.values():
                flat = tensor.view(torch.int16).view(-1)
                where = torch.randint(flat.numel(), (max(1, int(density * flat.numel())),), generator=generator)
                flat[where] += 1
            publisher.wait(publisher.publish())
    return base, stream


def catch_up(stream: Path, checkpoint: LocalCheckpoint, merge_from: int | None, counts: dict[str, int]) -> None:
    """Bring a checkpoint to the newest version."""
    with Follower(stream, merge_from=merge_from, verify="never") as follower:
        reports = list(follower.apply_to(checkpoint, until="head"))
    counts["steps"] = len(reports)
    counts["stored_bytes"] = sum(report.stored_bytes for report in reports)
    counts["set_elements"] = sum(report.num_changed for report in reports)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a size that proves nothing about speed")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write every number here")
    arguments = parser.parse_args()
    elements = 1 << 16 if arguments.small else arguments.elements
    samples = {way: Samples() for way in (_MERGED, _SINGLE, _UNSYNCED)}
    counts: dict[str, dict[str, int]] = {way: {} for way in samples}
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        base, stream = publish(work, elements=elements, versions=arguments.versions, density=arguments.density)
        for repeat in range(arguments.repeats):
            ways = list(samples) if repeat % 2 else list(samples)[::-1]
            for way in ways:
                place = work / "place"
                checkpoint = LocalCheckpoint(place, base=base, fsync=way != _UNSYNCED)
                with Follower(stream) as follower:
                    list(follower.apply_to(checkpoint, until=0))
                merge_from = 2 if way == _MERGED else None
                samples[way].seconds.append(timed(partial(catch_up, stream, checkpoint, merge_from, counts[way])))
                checkpoint.verify()
                checkpoint.close()
                shutil.rmtree(place)
    rows = [
        (
            way,
            counts[way]["steps"],
            f"{of.median_s:.3f}",
            f"{of.spread[0]:.3f} to {of.spread[1]:.3f}",
            f"{median_ratio(samples[_MERGED].seconds, of.seconds):.2f}",
            f"{counts[way]['stored_bytes'] / 2**20:.1f}",
            f"{counts[way]['set_elements']:,}",
        )
        for way, of in samples.items()
    ]
    head = ("way", "steps", "median s", "min to max s", "merged / it", "fetched MiB", "elements set")
    print(f"{arguments.versions} versions, {arguments.density:.2%} of {elements:,} bf16 elements each\n")
    print(table(head, rows))
    print(f"\n{machine()}", file=sys.stderr)
    if arguments.json is not None:
        result = {
            "machine": machine(),
            "versions": arguments.versions,
            "elements": elements,
            "density": arguments.density,
            "ways": {way: {"seconds": of.seconds, **counts[way]} for way, of in samples.items()},
        }
        arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
