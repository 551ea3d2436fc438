"""What a version costs at any scale, per phase: ours, and a design that gathers the model on rank 0.

    python benchmarks/scale_model.py                                  # every model, measured constants, a table each
    python benchmarks/scale_model.py --models llama-405b --world-sizes 256 512 1024 --density 0.01 --host-gbps 100
    python benchmarks/scale_model.py --validate --senders 4 --layers 8  # and check the model against real shards

Constants are measured first, on this machine, with the product's own code on one thread (`scale_work.py`): seconds per
element and per slice of capture, encode and decode, seconds per receipt and per slice of a commit, stored bytes per
changed element. Links, threads and store latency are arguments. Then

    ours, each rank      capture and encode: (elements of its shard, slices) / threads; upload: its bytes over its share
                         of the host's link; commit on rank 0: the receipts of all ranks; nothing is gathered
    gather on rank 0     the bf16 model over rank 0's fabric link; the same capture and encode over the whole model in
                         one process; all bytes over one host's link
    receiver, each host  all bytes over its link; decode and apply over the whole model, on its threads

`--validate` streams the shards that ranks of a 512-rank mesh hold of Llama-405B layers through that code, many senders
in turn, one layer in memory at a time, and compares the seconds with the prediction (aim: within 25%). Constants are
then measured between the layers as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from measure import machine, table
from scale_configs import MODELS, Model
from scale_work import PHASES, Work, one_commit, one_sender, shard
from trainer_overhead import compile_kernels

from torch_delta.format.box import Box
from torch_delta.format.schema import Schema, TensorSpec

VALIDATED_MESH = 512


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds = per_unit * units + per_item * items, both not negative."""

    per_unit: float
    per_item: float

    @classmethod
    def fit(cls, points: list[tuple[float, float, float]]) -> Line:
        """Least squares of relative errors over (units, items, seconds)."""
        rows = np.array([[units / seconds, items / seconds] for units, items, seconds in points])
        per_unit, per_item = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
        if per_unit < 0 or per_item < 0:
            column = 1 if per_unit < 0 else 0
            only = float(rows[:, column].sum() / (rows[:, column] ** 2).sum())
            return cls(per_unit=only * (column == 0), per_item=only * (column == 1))
        return cls(per_unit=float(per_unit), per_item=float(per_item))

    def at(self, units: float, items: float) -> float:
        return self.per_unit * units + self.per_item * items


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Measured here, one thread."""

    phases: dict[str, Line]
    """By phase: seconds per element and per slice."""
    commit: Line
    """Seconds per slice of all receipts, and per receipt."""
    bytes_per_changed: float


class Calibration:
    """Small and large shards, and commits, measured in turn; medians.

    In rounds, so that they can lie between the works of a validation: the speed of a shared machine drifts by more in a
    minute than the two differ.
    """

    def __init__(self, density: float, *, scale: int) -> None:
        self._density = density
        self._rng = np.random.default_rng(1)
        self._sizes = [
            (32, (16, 1024 // scale)),
            (8, (128, 1024 // scale)),
            (3, (1024, 1024 // scale)),
            (9, (768, 1024 // scale)),  # what one call costs whatever its size, shared by more elements
        ]
        self._works: dict[int, list[Work]] = {num: [] for num, _ in self._sizes}
        self._commits: dict[tuple[int, int], list[float]] = {
            counts: [] for counts in ((64, 8), (8, 1024 // scale), (64, 512 // scale))
        }

    def shards(self) -> None:
        """Measure each size of shard once more."""
        for num, shape in self._sizes:
            schema = Schema(tuple(TensorSpec(f"t{number:05d}", "BF16", shape) for number in range(num)))
            boxes = [(number, Box.whole(shape)) for number in range(num)]
            self._works[num].append(one_sender(schema, boxes, self._density, self._rng))

    def commits(self) -> None:
        """Measure each size of commit once more."""
        for counts, seconds in self._commits.items():
            seconds.append(one_commit(*counts))

    def constants(self) -> Constants:
        """Of everything so far."""
        largest = self._works[self._sizes[-1][0]]
        phases = {}
        for phase in PHASES:
            of_size = {
                num: statistics.median(work.seconds[phase] for work in works) for num, works in self._works.items()
            }
            phases[phase] = Line.fit([(self._works[num][0].elements, num, of_size[num]) for num, _ in self._sizes])
        return Constants(
            phases=phases,
            commit=Line.fit(
                [(world * slices, world, statistics.median(found)) for (world, slices), found in self._commits.items()]
            ),
            bytes_per_changed=sum(work.stored_bytes for work in largest) / sum(work.changed for work in largest),
        )


def predict(model: Model, world_size: int, constants: Constants, arguments: argparse.Namespace) -> dict[str, object]:
    """Bytes, seconds and memory of one version, per phase, for both designs."""
    per_host = min(arguments.ranks_per_host, world_size)
    host_bytes_per_s, fabric_bytes_per_s = arguments.host_gbps * 1e9 / 8, arguments.fabric_gbps * 1e9 / 8
    elements, slices = model.num_elements, model.num_tensors
    mine = elements / world_size
    changed = elements * arguments.density
    stored = changed * constants.bytes_per_changed
    put_s = arguments.put_ms / 1e3
    lines, threads = constants.phases, arguments.threads
    ours = {
        "capture_s": lines["capture"].at(mine, slices) / threads,
        "encode_s": lines["encode"].at(mine, slices) / threads,
        "upload_s": stored / world_size * per_host / host_bytes_per_s + put_s,
        "commit_s": constants.commit.at(world_size * slices, world_size) + 2 * put_s,
    }
    gathered = {
        "gather_s": 2 * elements / fabric_bytes_per_s,
        "capture_s": lines["capture"].at(elements, slices) / threads,
        "encode_s": lines["encode"].at(elements, slices) / threads,
        "upload_s": stored / host_bytes_per_s + put_s,
        "commit_s": constants.commit.at(slices, 1) + 2 * put_s,
    }
    receiver = {
        "fetch_s": stored / host_bytes_per_s + put_s,
        "decode_s": lines["decode"].at(elements, slices * world_size) / arguments.receiver_threads,
    }
    change_bytes = changed * 12  # position, old and new bits, and what is reduced of them
    return {
        "model": model.name,
        "world_size": world_size,
        "elements": elements,
        "full_bytes": 2 * elements,
        "stored_bytes": round(stored),
        "shard_elements": round(mine),
        "ours": ours,
        "gather_on_rank_0": gathered,
        "receiver": receiver,
        "memory_bytes": {
            "ours, each rank": round(2 * mine + arguments.max_in_flight * change_bytes / world_size),
            "gather, rank 0": round(2 * elements + 2 * model.largest_tensor + arguments.max_in_flight * change_bytes),
            "receiver, each host": 2 * model.largest_tensor + (64 << 20),
        },
    }


def layer_schema(model: Model, num_layers: int) -> Schema:
    tensors = [entry for number in range(num_layers) for entry in model.layer(number)]
    return Schema(tuple(TensorSpec(name, "BF16", shape) for name, shape in sorted(tensors)))


def validate(calibration: Calibration, arguments: argparse.Namespace) -> dict[str, object]:
    """Real shards of many senders in turn, one layer at a time, beside the prediction; and a commit of another size.

    The calibration goes on in between.
    """
    model = MODELS["llama-405b"]
    num_layers, num_senders, mesh = arguments.layers, arguments.senders, arguments.mesh
    schema = layer_schema(model, num_layers)
    rng = np.random.default_rng(2)
    totals = dict.fromkeys(PHASES, 0.0)
    elements = slices = changed = stored = 0
    for sender in range(num_senders):
        rank = sender * mesh // num_senders
        for layer in range(num_layers):
            names = {name for name, _ in model.layer(layer)}
            boxes = [
                (number, box)
                for number, spec in enumerate(schema.tensors)
                if spec.name in names and (box := shard(spec.shape, rank, mesh)) is not None
            ]
            work = one_sender(schema, boxes, arguments.density, rng, rank=rank)
            elements, slices = elements + work.elements, slices + work.slices
            changed, stored = changed + work.changed, stored + work.stored_bytes
            for phase in PHASES:
                totals[phase] += work.seconds[phase]
            calibration.shards()
    world, per_rank = (16, 300) if arguments.small else (128, 300)
    commits = []
    for _ in range(arguments.repeats):
        commits.append(one_commit(world, per_rank))
        calibration.commits()
    totals["commit"] = statistics.median(commits)
    constants = calibration.constants()
    predicted = {phase: constants.phases[phase].at(elements, slices) for phase in PHASES}
    predicted["commit"] = constants.commit.at(world * per_rank, world)
    return {
        "senders": num_senders,
        "mesh": mesh,
        "layers": num_layers,
        "elements": elements,
        "slices": slices,
        "changed": changed,
        "measured_s": totals,
        "predicted_s": predicted,
        "measured_bytes": stored,
        "predicted_bytes": round(changed * constants.bytes_per_changed),
        "ratios": {phase: predicted[phase] / totals[phase] for phase in totals},
    }


def report(rows: list[dict], checked: dict | None) -> str:
    header = ["model, ranks", "full GB", "version GB", "phase", "ours s", "gather on rank 0 s", "receiver s"]
    lines: list[list[object]] = []
    for row in rows:
        first = [f"{row['model']}, {row['world_size']}", f"{row['full_bytes'] / 1e9:.1f}"]
        first.append(f"{row['stored_bytes'] / 1e9:.3f}")
        ours, gathered, receiver = row["ours"], row["gather_on_rank_0"], row["receiver"]
        for phase in ("gather_s", "capture_s", "encode_s", "upload_s", "commit_s", "fetch_s", "decode_s"):
            cells = [side.get(phase) for side in (ours, gathered, receiver)]
            lines.append([*first, phase[:-2], *("-" if cell is None else f"{cell:.3g}" for cell in cells)])
            first = ["", "", ""]
        memory = [f"{size / 2**30:.3g}" for size in row["memory_bytes"].values()]
        lines.append([*first, "extra memory, GiB", *memory])
    text = table(header, lines)
    if checked is not None:
        rows_of = [
            [phase, f"{checked['predicted_s'][phase]:.3f}", f"{seconds:.3f}", f"{checked['ratios'][phase]:.2f}"]
            for phase, seconds in checked["measured_s"].items()
        ]
        size = [f"{checked[f'{kind}_bytes'] / 1e6:.2f}" for kind in ("predicted", "measured")]
        rows_of.append(["MB", *size, f"{checked['predicted_bytes'] / checked['measured_bytes']:.2f}"])
        text += (
            f"\n\n{checked['senders']} senders of {checked['mesh']}, {checked['layers']} layers of Llama-405B, "
            f"{checked['elements']:,} elements in {checked['slices']:,} slices, {checked['changed']:,} changed\n\n"
        )
        text += table(["phase", "predicted s", "measured s", "ratio"], rows_of)
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--density", type=float, default=0.01, help="changed elements over all")
    parser.add_argument("--host-gbps", type=float, default=25.0, help="a host's link to the store, gigabits per second")
    parser.add_argument("--fabric-gbps", type=float, default=400.0, help="rank 0's link to the other ranks")
    parser.add_argument("--put-ms", type=float, default=50.0, help="the store's answer time")
    parser.add_argument("--threads", type=int, default=4, help="threads per rank that capture and encode")
    parser.add_argument("--receiver-threads", type=int, default=16, help="threads per host that decode")
    parser.add_argument("--max-in-flight", type=int, default=2, help="versions collected and not committed")
    parser.add_argument("--repeats", type=int, default=5, help="of each calibration point")
    parser.add_argument("--validate", action="store_true", help="stream real shards of Llama-405B and compare")
    parser.add_argument("--senders", type=int, default=4, help="validation: senders in turn")
    parser.add_argument("--layers", type=int, default=8, help="validation: layers of each sender")
    parser.add_argument("--mesh", type=int, default=VALIDATED_MESH, help="validation: ranks that share a layer")
    parser.add_argument(
        "--small", action="store_true", help="tiny shards, nothing compiled: does the script still run?"
    )
    parser.add_argument("--work", type=Path, default=None, help="not used; every benchmark takes it")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(1)
    if not arguments.small:
        compile_kernels()
    calibration = Calibration(arguments.density, scale=16 if arguments.small else 1)
    for _ in range(arguments.repeats):
        calibration.shards()
        calibration.commits()
    checked = validate(calibration, arguments) if arguments.validate else None
    constants = calibration.constants()
    rows = [
        predict(MODELS[name], world_size, constants, arguments)
        for name in arguments.models
        for world_size in arguments.world_sizes
    ]
    print(machine(), "\n")
    print(json.dumps(asdict(constants), indent=1), "\n")
    print(report(rows, checked))
    if arguments.json is not None:
        numbers = {"machine": machine(), "constants": asdict(constants), "predictions": rows, "validation": checked}
        arguments.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
