"""SkyRL's own delta backend against torch_delta in its seat, through the same SkyRL-facing calls, on several ranks.

    DIR/bin/python benchmarks/skyrl_side_by_side.py --trace qwen-lr1e-06-warm-19-20 [--repeats 5] [--json FILE]
    DIR/bin/python benchmarks/skyrl_side_by_side.py --trace synthetic --layers 16 --width 2048      # 1.0e9 parameters

DIR is an environment with SkyRL and vLLM (scripts/install_skyrl.py). Each side has `--ranks` trainer processes under
gloo, which read the same weights from a mapped file through SkyRL's `WeightSource`, and a process that stands for one
host of servers: it fetches into SkyRL's `LocalCheckpointStore` or into our `LocalCheckpoint`. A round is what SkyRL
asks for: `send_weights()` on every rank, in which rank 0 has the client fetch. Versions alternate between the two
weights of the trace, so that each has the same number of changed elements; at the end both hosts' copies are compared
with the weights bit for bit. Loading into vLLM is skyrl_load.py.

Sides take turns going first, and one waits while the other works. Publish seconds are those of `send_weights` on rank 0
without those of the fetch. Memory is what a process holds that is not a mapped file (RssAnon, looked at every 10 ms),
at its peak in a round, above what it held before the engine was built: copies of weights, and buffers.

Our kernels are compiled on a machine's first run and loaded by later ones: run twice, and take the second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import machine, median_ratio, table
from peers import folder_bytes
from safetensors import safe_open
from safetensors.torch import save_file
from traces import Pair, recorded

SIDES = ("SkyRL", "torch_delta")
_MIB = 1 << 20


# -- the processes of a side -------------------------------------------------------------------------------------------


class Memory:
    """Peak of this process's anonymous memory, in bytes, above what it was when this was made."""

    def __init__(self) -> None:
        self._before = self._now()
        self.peak_bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self._now() - self._before)
            time.sleep(0.01)

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon"):
                return 1024 * int(line.split()[1])
        raise RuntimeError("/proc/self/status has no RssAnon")


class Client:
    """SkyRL's client protocol on rank 0; only `fetch_weights` does something: it asks the host and waits.

    Args:
        host: connection to the side's host; None on other ranks.
    """

    def __init__(self, host: Any) -> None:
        self._host = host
        self.fetch_s = 0.0

    def fetch_weights(self, target_version: int, sync_dir: str | None = None, uri: str | None = None) -> None:
        del sync_dir, uri
        started_s = time.perf_counter()
        self._host.send(target_version)
        self._host.recv()
        self.fetch_s = time.perf_counter() - started_s

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def prepare() -> None:
    """SkyRL asks for Python 3.12, where one typing name has grown."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


def be_rank(name: str, rank: int, arguments: argparse.Namespace, work: Path, controller: Any, host: Any) -> None:
    """A trainer rank: for each path that is sent, the weights in it become a version."""
    prepare()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{work / name}.rendezvous", rank=rank, world_size=arguments.ranks
    )
    from skyrl.backends.skyrl_train.weight_sync.delta import trainer
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    import torch_delta_skyrl.trainer
    from torch_delta_skyrl.settings import publish_config

    now = work / "old.safetensors"

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in self]

        def __iter__(self) -> Any:
            with safe_open(now, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    yield key, opened.get_tensor(key)

    info = trainer.DeltaTrainerInitInfo(
        base_model_path=str(work / "base"),
        sync_dir=str(work / name / "sync"),
        local_checkpoint_dir=str(work / name / "host"),
        publish_staging_dir=str(work / name / "staging"),
        rank=rank,
    )
    of_side = {
        "SkyRL": trainer.DeltaTrainerWeightTransferEngine,
        "torch_delta": torch_delta_skyrl.trainer.TrainerEngine,
    }
    client = Client(host)
    memory = Memory()
    engine = of_side[name].trainer_init(info, client=client, source=Source())
    if name == "torch_delta":
        engine.use(replace(publish_config(info), profile=arguments.profile))
    controller.send("ready")
    while (path := controller.recv()) is not None:
        now = path
        torch.distributed.barrier()
        memory.peak_bytes = 0
        started_s = time.perf_counter()
        engine.send_weights()
        seconds = time.perf_counter() - started_s
        controller.send({"publish_s": seconds - client.fetch_s, "fetch_s": client.fetch_s, "bytes": memory.peak_bytes})
    engine.shutdown()
    torch.distributed.destroy_process_group()


def be_host(name: str, work: Path, rank: Any, controller: Any) -> None:
    """The host of servers: fetches each version that rank 0 asks for; says its peak memory at the end."""
    prepare()
    base, sync, folder = work / "base", work / name / "sync", work / name / "host"
    if name == "SkyRL":
        from skyrl.backends.skyrl_train.weight_sync.delta import checkpoint

        store = checkpoint.LocalCheckpointStore(str(base), str(folder))

        def fetch(version: int) -> None:
            store.fetch(version, sync_dir=str(sync))
    else:
        from torch_delta import Follower, LocalCheckpoint

        ours, followers = LocalCheckpoint(folder, base=base), []

        def fetch(version: int) -> None:
            if not followers:
                followers.append(Follower(str(sync)))
            for _ in followers[0].apply_to(ours, until=version):
                pass

    memory = Memory()
    controller.send("ready")
    while (version := rank.recv()) is not None:
        fetch(version)
        rank.send("done")
        controller.send(memory.peak_bytes)
        memory.peak_bytes = 0


class Side:
    """The processes of one backend, seen from the one that measures."""

    def __init__(self, name: str, arguments: argparse.Namespace, work: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name, self._work = name, work
        (work / name).mkdir()
        to_rank, self._to_host = spawn.Pipe()
        self._host, host = spawn.Pipe()
        self._ranks, processes = [], [spawn.Process(target=be_host, args=(name, work, to_rank, host))]
        for rank in range(arguments.ranks):
            here, there = spawn.Pipe()
            self._ranks.append(here)
            mine = self._to_host if rank == 0 else None
            processes.append(spawn.Process(target=be_rank, args=(name, rank, arguments, work, there, mine)))
        self._processes = processes
        for process in processes:
            process.start()
        for connection in (self._host, *self._ranks):
            assert connection.recv() == "ready"
        self.rounds: list[dict[str, Any]] = []

    def round(self, path: Path, *, counts: bool) -> None:
        sync = self._work / self.name / "sync"
        before = folder_bytes(sync) if sync.exists() else 0
        os.sync()
        for rank in self._ranks:
            rank.send(path)
        told = [rank.recv() for rank in self._ranks]
        found = {key: told[0][key] for key in ("publish_s", "fetch_s")}
        found |= {"rank_bytes": [one["bytes"] for one in told], "host_bytes": self._host.recv()}
        found |= {"wire_bytes": folder_bytes(sync) - before}
        if counts:
            self.rounds.append(found)

    def values(self, key: str) -> list[float]:
        if key == "rank_bytes":
            return [max(one[key]) for one in self.rounds]
        if key == "both_s":
            return [one["publish_s"] + one["fetch_s"] for one in self.rounds]
        return [one[key] for one in self.rounds]

    def check(self, path: Path) -> None:
        host = self._work / self.name / "host"
        folder = host / "weights" if self.name == "SkyRL" else host
        with safe_open(path, framework="pt") as sent, safe_open(folder / "model.safetensors", framework="pt") as held:
            for key in sent.keys():  # noqa: SIM118 - not a dict
                if not torch.equal(sent.get_tensor(key).view(torch.int16), held.get_tensor(key).view(torch.int16)):
                    sys.exit(f"{self.name}: {key} is not what was sent")

    def close(self) -> None:
        for rank in self._ranks:
            rank.send(None)
        for process in self._processes[1:]:
            process.join(60)
        self._to_host.send(None)
        self._processes[0].join(60)


# -- weights and figures -----------------------------------------------------------------------------------------------


def write_weights(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write both weights and the base; says what they are."""
    if arguments.trace == "synthetic":
        old, new = synthetic(arguments.layers, arguments.width, arguments.step)
    else:
        pair: Pair = recorded(arguments.traces, arguments.trace)
        old, new = pair.old, pair.new
    changed = sum(int((old[key].view(torch.int16) != new[key].view(torch.int16)).sum()) for key in old)
    total = sum(tensor.numel() for tensor in old.values())
    for name, weights in (("old", old), ("new", new)):
        save_file(weights, work / f"{name}.safetensors", metadata={"format": "pt"})
    (work / "base").mkdir()
    os.link(work / "old.safetensors", work / "base" / "model.safetensors")
    (work / "base" / "config.json").write_text('{"model_type": "benchmark"}', encoding="utf-8")
    return {"trace": arguments.trace, "num_elements": total, "density": changed / total}


def synthetic(layers: int, width: int, step: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A transformer's shapes as bf16, and the same after each fp32 master has moved by about `step`, as Adam moves it.

    So the elements whose bf16 changes are those of small magnitude first, as in training. Uniform changes would be
    harder to code than real ones.
    """
    shapes = {"model.embed_tokens.weight": (16 * width, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{key}_proj.weight": (width, width) for key in "qo"}
        shapes |= {f"{name}.self_attn.{key}_proj.weight": (width // 4, width) for key in "kv"}
        shapes |= {f"{name}.mlp.{key}_proj.weight": (4 * width, width) for key in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (width, 4 * width)}
    generator = torch.Generator().manual_seed(0)
    old, new = {}, {}
    for key, shape in shapes.items():
        master = torch.empty(shape).normal_(0, 0.02, generator=generator)
        old[key] = master.bfloat16()
        new[key] = master.add_(torch.empty(shape).normal_(0, step, generator=generator)).bfloat16()
    return old, new


def report(sides: list[Side], told: dict[str, Any], arguments: argparse.Namespace) -> None:
    columns = {
        "wire_bytes": 1,
        "publish_s": 1e-3,
        "fetch_s": 1e-3,
        "both_s": 1e-3,
        "rank_bytes": _MIB,
        "host_bytes": _MIB,
    }
    header = ("side", "bytes", "publish ms", "fetch ms", "both ms", "most on a rank MiB", "host MiB")
    rows = [
        [side.name, *(f"{statistics.median(side.values(key)) / unit:,.0f}" for key, unit in columns.items())]
        for side in sides
    ]
    ratios = [median_ratio(sides[1].values(key), sides[0].values(key)) for key in columns]
    rows.append(["ratio", *(f"{ratio:.2f}" for ratio in ratios)])
    print(
        f"{told['trace']}: {told['num_elements']:,} parameters, {told['density']:.2%} changed, "
        f"{arguments.ranks} ranks, profile {arguments.profile}"
    )
    print(table(header, rows))
    if arguments.json is not None:
        found = {"machine": machine(), "weights": told, "ranks": arguments.ranks, "profile": arguments.profile}
        found |= {"sides": {side.name: side.rounds for side in sides}}
        arguments.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="synthetic", help="name of a recorded trace, or synthetic")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder of the traces")
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic weights")
    parser.add_argument("--width", type=int, default=1024, help="of the synthetic weights")
    parser.add_argument("--step", type=float, default=3e-7, help="by which synthetic masters move: the learning rate")
    parser.add_argument("--profile", choices=("auto", "small", "fast"), default="auto", help="ours; SkyRL has none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None, help="folder for everything (default: temporary)")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        told = write_weights(arguments, work)
        sides = [Side(name, arguments, work) for name in SIDES]
        for number in range(
            arguments.repeats + 1
        ):  # the first is for pools, snapshots and the hosts' copies of the base
            path = work / ("old.safetensors" if number % 2 else "new.safetensors")
            for side in sides if number % 2 else sides[::-1]:
                side.round(path, counts=number > 0)
        for side in sides:
            side.check(path)
        report(sides, told, arguments)
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
