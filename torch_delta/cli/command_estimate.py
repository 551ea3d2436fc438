"""`torch-delta estimate`: what two checkpoints' difference would cost, before anybody publishes anything."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any

from torch_delta.cli.estimate import estimate
from torch_delta.cli.output import counted, human_bytes, share, times_smaller
from torch_delta.cli.pairs import Pair
from torch_delta.cli.run import OK

if TYPE_CHECKING:
    import argparse

    from torch_delta.cli.output import Output


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Compare `arguments.old` with `arguments.new`."""
    pair = Pair.open(arguments.old, arguments.new)
    with output.progress("comparing", sum(spec.nbytes for spec in pair.schema.tensors)) as advance:
        found = estimate(pair, advance)
    mbps: float | None = arguments.link_mbps
    record: dict[str, Any] = {
        "old": str(arguments.old),
        "new": str(arguments.new),
        "num_tensors": len(pair.schema.tensors),
        "total_elements": found.total_elements,
        "changed_elements": found.changed_elements,
        "full_bytes": found.full_bytes,
        "bound_bytes": ceil(found.bound_bits / 8),
        "compare_s": found.compare_s,
        "link_mbps": mbps,
        "full_link_s": _link_s(found.full_bytes, mbps),
        "encodings": {
            name: asdict(cost) | {"link_s": _link_s(cost.bytes, mbps)} for name, cost in found.encodings.items()
        },
        "kinds": [asdict(kind) for kind in sorted(found.kinds.values(), key=lambda kind: -kind.elements)],
    }
    output.record(record)
    _show(output, record)
    return OK


def _link_s(num_bytes: int, mbps: float | None) -> float | None:
    return None if mbps is None else num_bytes * 8 / (mbps * 1e6)


def _show(output: Output, record: dict[str, Any]) -> None:
    changed, total, full = record["changed_elements"], record["total_elements"], record["full_bytes"]
    output.line(f"{record['old']} -> {record['new']}", style="bold")
    output.line(f"{counted(record['num_tensors'], 'tensor')}, {total:,} elements, {human_bytes(full)}")
    output.line(f"{changed:,} elements changed ({share(changed, total)}), found in {record['compare_s']:.2f} s")
    output.line()
    rows = [
        [row["kind"], f"{row['num_tensors']:,}", f"{row['elements']:,}", share(row["changed"], row["elements"])]
        for row in record["kinds"]
    ]
    output.table(["tensors", "number", "elements", "changed"], rows, left=1)
    output.line()
    headings = ["encoding", "bytes", "x smaller", "bits/changed", "encode s", "decode s"]
    link = record["link_mbps"]
    rows = [["full copy", human_bytes(full), "1", "-", "-", "-", _seconds(record["full_link_s"])]]
    for name, cost in record["encodings"].items():
        seconds = [f"{cost['encode_s']:.2f}", f"{cost['decode_s']:.2f}", _seconds(cost["link_s"])]
        size = cost["bytes"]
        rows.append([name, human_bytes(size), times_smaller(full, size), _per_changed(size, changed), *seconds])
    bound = record["bound_bytes"]
    rows.append(
        ["entropy bound", human_bytes(bound), times_smaller(full, bound), _per_changed(bound, changed), "-", "-", "-"]
    )
    if link is None:
        output.table(headings, [row[:-1] for row in rows], left=1)
    else:
        output.table([*headings, f"s at {link:g} Mbit/s"], rows, left=1)
    output.line("seconds are of one thread of this machine; every encoding was decoded again and proved")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _per_changed(num_bytes: int, changed: int) -> str:
    return f"{8 * num_bytes / changed:.2f}" if changed else "-"
