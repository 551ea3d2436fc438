"""Publish and follow real weight updates: torch_delta beside SkyRL's own publisher and store, in one interleaved run.

    python benchmarks/publish_follow.py                          # all traces, SkyRL beside us where it is installed
    python benchmarks/publish_follow.py --only qwen --repeats 15 --json out.json

Per trace both sides start from the same base folder holding the old weights. Then versions alternate new, old, new, ...
so that every version has the same number of changed elements and everything that is warm in a long run is warm here.
A repeat is one version: sync the disk, publish on one side, sync, publish on the other, the same for fetch + apply;
who goes first changes from repeat to repeat. At the end each local checkpoint is compared with the weights bit by bit.

Bytes are everything the version added to the stream, manifest or commit included, in the direction old -> new.
Publish seconds run from the call with full tensors to the moment a follower can see the version; follow seconds from
there until the local checkpoint is verified and complete.

Ours runs once per profile of its encoding (`--profiles`), each a side of its own.

Durability: publishing fsyncs data and folders on both sides. SkyRL's receiving side fsyncs nothing, ours does unless
told otherwise, so ours has two followers: one that fsyncs nothing either, and one as it is by default. The last table
counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from measure import Samples, count_fsyncs, machine, median_ratio, table, timed
from peers import Peer, skyrl
from peers.torch_delta import TorchDelta
from safetensors.torch import load_file, save_file
from traces import Pair, names, recorded, synthetic

_WARM_UP_VERSIONS = 6
REPOSITORY = Path(__file__).resolve().parent.parent
MakePeer = Callable[[Path, Path], Peer]


@dataclass
class Side:
    """What was measured of one peer on one trace."""

    name: str
    wire_bytes: int = 0
    publish: Samples = field(default_factory=Samples)
    follow: dict[str, Samples] = field(default_factory=dict)
    fsyncs: dict[str, int] = field(default_factory=dict)
    """Per version: of publishing, and of each follower by title."""


def run_trace(pair: Pair, makers: list[MakePeer], *, repeats: int, work: Path) -> list[Side]:
    """Measure all peers on one pair of weights.

    Args:
        pair: the weights.
        makers: build a peer from a base folder and an empty folder.
        repeats: timed versions.
        work: empty folder on the disk to measure; removed by the caller.
    """
    base = work / "base"
    base.mkdir()
    save_file(pair.old, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text('{"model_type": "benchmark"}', encoding="utf-8")
    with contextlib.ExitStack() as stack:
        peers = []
        for number, make in enumerate(makers):
            folder = work / str(number)
            folder.mkdir()
            peers.append(make(base, folder))
            stack.callback(peers[-1].close)
        sides = [Side(peer.name, follow={title: Samples() for title in peer.followers}) for peer in peers]
        warm_up(pair, peers, sides)
        for repeat in range(repeats):
            weights = pair.old if repeat % 2 else pair.new
            order = list(zip(peers, sides, strict=True))
            if repeat % 4 in (1, 2):  # every order meets every direction
                order.reverse()
            for peer, side in order:
                side.publish.seconds.append(timed(partial(peer.publish, weights)))
            for peer, side in order:
                for title, follow in _turned(list(peer.followers.items()), repeat):
                    side.follow[title].seconds.append(timed(follow))
            if weights is pair.new:
                for peer, side in order:
                    side.wire_bytes = peer.wire_bytes()
        for peer in peers:
            check_exact(peer, weights)
    return sides


def _turned(items: list[tuple[str, Callable[[], object]]], repeat: int) -> list[tuple[str, Callable[[], object]]]:
    return items[::-1] if repeat % 2 else items


def warm_up(pair: Pair, peers: list[Peer], sides: list[Side]) -> None:
    """Untimed versions: working copies are made, hot loops compiled, nothing happens for the first time afterwards.

    Counts the fsyncs of the last one.
    """
    for number in range(_WARM_UP_VERSIONS):
        for peer, side in zip(peers, sides, strict=True):
            with count_fsyncs() as count:
                peer.publish(pair.old if number % 2 else pair.new)
            side.fsyncs["publish"] = count[0]
            for title, follow in peer.followers.items():
                with count_fsyncs() as count:
                    follow()
                side.fsyncs[title] = count[0]


def check_exact(peer: Peer, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise SystemExit unless each local checkpoint of the peer holds `weights` bit for bit."""
    for title, folder in peer.checkpoints().items():
        found: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            found |= load_file(path)
        for name, tensor in weights.items():
            if name not in found or not torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)):
                raise SystemExit(f"{title}: the local checkpoint's {name!r} differs from the published weights")


def report(results: list[tuple[Pair, list[Side]]]) -> str:
    """The Markdown tables."""
    sides = results[0][1]
    titles = [title for side in sides for title in side.follow]
    header = ["trace", "changed", "full MB", *(f"{side.name} bytes" for side in sides)]
    header += [f"{side.name} publish ms" for side in sides] + [f"{title} follow ms" for title in titles]
    rows = []
    for pair, measured in results:
        row: list[object] = [pair.name, f"{100 * pair.density:.2f}%", f"{pair.full_bytes / 1e6:.1f}"]
        row += [f"{side.wire_bytes:,}" for side in measured]
        row += [_milliseconds(side.publish) for side in measured]
        row += [_milliseconds(samples) for side in measured for samples in side.follow.values()]
        rows.append(row)
    text = [table(header, rows)]
    if len(sides) > 1:
        columns = list(ratios(results[0][1]))
        measured_ratios = [(pair.name, ratios(measured)) for pair, measured in results]
        rows = [[name, *(f"{found[column]:.2f}" for column in columns)] for name, found in measured_ratios]
        medians = (statistics.median(found[column] for _, found in measured_ratios) for column in columns)
        rows.append(["**median**", *(f"**{median:.2f}**" for median in medians)])
        text.append(table([f"ratio to {sides[0].name}", *columns], rows))
    rows = [[f"{side.name}: {title}", count] for side in sides for title, count in side.fsyncs.items()]
    text.append(table(["fsync calls per version", "number"], rows))
    return "\n\n".join(text)


def _milliseconds(samples: Samples) -> str:
    low, high = samples.spread
    return f"{1e3 * samples.median_s:.0f} ({1e3 * low:.0f}-{1e3 * high:.0f})"


def ratios(sides: list[Side]) -> dict[str, float]:
    """Bytes, publish and follow of every side after the first, against the first."""
    first = sides[0]
    first_follow = list(first.follow.values())[-1]  # the one without fsync, where there are two
    found = {}
    for side in sides[1:]:
        found[f"{side.name} bytes"] = side.wire_bytes / first.wire_bytes
        found[f"{side.name} publish"] = median_ratio(side.publish.seconds, first.publish.seconds)
        for title, samples in side.follow.items():
            found[f"{title} follow"] = median_ratio(samples.seconds, first_follow.seconds)
    return found


def as_json(results: list[tuple[Pair, list[Side]]], arguments: argparse.Namespace, before: dict) -> dict:
    """Everything measured, raw."""
    return {
        "command": " ".join(["publish_follow.py", *sys.argv[1:]]),
        "machine": before,
        "load_1min_after": machine()["load_1min"],
        "threads": arguments.threads,
        "traces": [
            {
                "name": pair.name,
                "changed": pair.num_changed,
                "elements": pair.num_elements,
                "sides": [
                    {
                        "name": side.name,
                        "wire_bytes": side.wire_bytes,
                        "publish_s": side.publish.seconds,
                        "follow_s": {title: samples.seconds for title, samples in side.follow.items()},
                        "fsyncs": side.fsyncs,
                    }
                    for side in sides
                ],
            }
            for pair, sides in results
        ],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = REPOSITORY.parent / "shared" / "traces"
    parser.add_argument("--traces", type=Path, default=default, help="folder of recorded traces")
    parser.add_argument("--only", default="", help="run the traces whose name contains this")
    parser.add_argument("--repeats", type=int, default=9, help="timed versions per trace")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument(
        "--profiles", default="small,fast", help="of our encoding, one side for each: small, fast or auto, with commas"
    )
    parser.add_argument("--work", type=Path, default=None, help="folder on the disk to measure (default: temporary)")
    parser.add_argument("--no-skyrl", action="store_true", help="leave SkyRL out even where it is installed")
    parser.add_argument("--small", action="store_true", help="one tiny synthetic pair: does the script still run?")
    parser.add_argument("--json", type=Path, default=None, help="also write the raw samples to this file")
    parsed = parser.parse_args(arguments)
    if parsed.repeats < 1 or parsed.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    return parsed


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    makers: list[MakePeer] = []
    reason = "left out by --no-skyrl" if arguments.no_skyrl else skyrl.missing()
    if reason is None:
        makers.append(partial(skyrl.SkyRL, num_threads=arguments.threads))
    else:
        print(f"SkyRL side skipped: {reason}", file=sys.stderr)
    makers += [
        partial(TorchDelta, num_threads=arguments.threads, profile=profile) for profile in arguments.profiles.split(",")
    ]
    before = machine()
    print(f"machine: {before}, {arguments.threads} threads per side, {arguments.repeats} repeats", file=sys.stderr)
    results = []
    for pair in _pairs(arguments):
        work = Path(tempfile.mkdtemp(prefix="publish-follow-", dir=arguments.work))
        try:
            sides = run_trace(pair, makers, repeats=arguments.repeats, work=work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        results.append((pair, sides))
        print(f"{pair.name}: done", file=sys.stderr)
    print(report(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results, arguments, before), indent=1), encoding="utf-8")


def _pairs(arguments: argparse.Namespace):
    if arguments.small:
        yield synthetic()
        return
    found = [name for name in names(arguments.traces) if arguments.only in name]
    if not found:
        raise SystemExit(f"no trace whose name contains {arguments.only!r} in {arguments.traces}; try --small")
    for name in found:
        yield recorded(arguments.traces, name)


if __name__ == "__main__":
    main()
