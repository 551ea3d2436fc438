"""SkyRL's own delta backend against torch_delta in its seat, through the same SkyRL-facing calls, in one process.

    DIR/bin/python benchmarks/skyrl_side_by_side.py [--layers 4 --width 1024 --density 0.01 --repeats 3] [--json FILE]

DIR is an environment with SkyRL and vLLM (scripts/install_skyrl.py). Both sides get the same weights through SkyRL's
`WeightSource`, and the same round: `send_weights()`, which publishes and then has the client fetch. The client stands
for one host: it fetches into SkyRL's `LocalCheckpointStore` or into our `LocalCheckpoint`, and what that holds is
compared with the weights bit for bit after each round. Loading into vLLM is measured by benchmarks/pause.py.

Sides take turns going first. Seconds of a publish are those of `send_weights` without those of the fetch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import typing
from pathlib import Path
from typing import Any

import torch
from measure import machine, table
from peers import folder_bytes
from safetensors.torch import load_file, save_file


class Client:
    """One host behind SkyRL's client protocol; only `fetch_weights` does something.

    Args:
        fetch: brings the host's checkpoint to a version.
    """

    def __init__(self, fetch: Any) -> None:
        self._fetch = fetch
        self.fetch_s = 0.0

    def fetch_weights(self, target_version: int, sync_dir: str | None = None, uri: str | None = None) -> None:
        del sync_dir, uri
        started_s = time.perf_counter()
        self._fetch(target_version)
        self.fetch_s = time.perf_counter() - started_s

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Side:
    """One backend's trainer engine and host."""

    def __init__(self, name: str, base: Path, work: Path, weights: dict[str, torch.Tensor]) -> None:
        from skyrl.backends.skyrl_train.weight_sync.delta import checkpoint, trainer
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        from torch_delta import Follower, LocalCheckpoint
        from torch_delta_skyrl.trainer import TrainerEngine

        class Source(WeightSource):
            def metadata(self) -> list[Any]:
                return [ParamMeta(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in weights.items()]

            def __iter__(self) -> Any:
                yield from weights.items()

        self.name, self.sync = name, work / name / "sync"
        host = work / name / "host"
        info = trainer.DeltaTrainerInitInfo(
            base_model_path=str(base),
            sync_dir=str(self.sync),
            local_checkpoint_dir=str(host),
            publish_staging_dir=str(work / name / "staging"),
            rank=0,
        )
        self.publish_s: list[float] = []
        self.fetch_s: list[float] = []
        self.wire_bytes: list[int] = []
        if name == "SkyRL":
            kept = checkpoint.LocalCheckpointStore(str(base), str(host))
            self.client = Client(lambda version: kept.fetch(version, sync_dir=str(self.sync)))
            self.engine = trainer.DeltaTrainerWeightTransferEngine.trainer_init(
                info, client=self.client, source=Source()
            )
            self.folder = host / "weights"
        else:
            ours = LocalCheckpoint(host, base=base)
            followers: list[Follower] = []

            def fetch(version: int) -> None:
                if not followers:
                    followers.append(Follower(str(self.sync)))
                for _ in followers[0].apply_to(ours, until=version):
                    pass

            self.client = Client(fetch)
            self.engine = TrainerEngine.trainer_init(info, client=self.client, source=Source())
            self.folder = host

    def round(self, *, counts: bool) -> None:
        before = folder_bytes(self.sync) if self.sync.exists() else 0
        started_s = time.perf_counter()
        self.engine.send_weights()
        total_s = time.perf_counter() - started_s
        if counts:
            self.publish_s.append(total_s - self.client.fetch_s)
            self.fetch_s.append(self.client.fetch_s)
            self.wire_bytes.append(folder_bytes(self.sync) - before)

    def check(self, weights: dict[str, torch.Tensor]) -> None:
        held = load_file(str(self.folder / "model.safetensors"))
        wrong = [
            name
            for name, tensor in weights.items()
            if not torch.equal(tensor.view(torch.int16), held[name].view(torch.int16))
        ]
        if wrong:
            sys.exit(f"{self.name}: {len(wrong)} tensors are not what was sent, such as {wrong[0]}")

    def median(self, values: list[float]) -> float:
        return statistics.median(values)


def move(weights: dict[str, torch.Tensor], density: float, seed: int) -> None:
    """Change about `density` of all elements by their last bit, as a small learning rate does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        flat = tensor.view(-1).view(torch.int16)
        index = torch.randint(flat.numel(), (max(1, int(density * flat.numel())),), generator=generator)
        flat[index] ^= 1


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None, help="folder for everything (default: temporary)")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    torch.manual_seed(0)
    width = arguments.width
    weights = {
        f"model.layers.{n}.mlp.weight": torch.randn(4 * width, width).mul_(0.02).to(torch.bfloat16)
        for n in range(arguments.layers)
    }
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        base = work / "base"
        base.mkdir()
        save_file(weights, str(base / "model.safetensors"))
        sides = [Side(name, base, work, weights) for name in ("SkyRL", "torch_delta")]
        for number in range(arguments.repeats + 1):  # the first is for caches, pools and the copies of the base
            move(weights, arguments.density, number)
            for side in sides if number % 2 else sides[::-1]:
                side.round(counts=number > 0)
                side.check(weights)
        report(sides, arguments)
        for side in sides:
            side.engine.shutdown()


def report(sides: list[Side], arguments: argparse.Namespace) -> None:
    rows = [
        (
            side.name,
            f"{side.median(side.wire_bytes):,.0f}",
            f"{1e3 * side.median(side.publish_s):.1f}",
            f"{1e3 * side.median(side.fetch_s):.1f}",
        )
        for side in sides
    ]
    print(table(("side", "bytes", "publish ms", "fetch ms"), rows))
    if arguments.json is not None:
        found = {
            "machine": machine(),
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "sides": {
                s.name: {"wire_bytes": s.wire_bytes, "publish_s": s.publish_s, "fetch_s": s.fetch_s} for s in sides
            },
        }
        arguments.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
