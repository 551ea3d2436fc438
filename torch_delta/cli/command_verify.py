"""`torch-delta verify`: prove a stream, and a checkpoint folder against it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch_delta.cli.output import counted, human_bytes
from torch_delta.cli.proof import Prover
from torch_delta.cli.run import OK, PROBLEM
from torch_delta.format.keys import ANCHORS_PREFIX, PARTS_PREFIX
from torch_delta.stream import Stream

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from torch_delta.cli.output import Output
    from torch_delta.store import Store

_TENSORS_SHOWN = 10


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Prove the stream in `store`, and say which version `arguments.checkpoint` is."""
    folder: Path | None = arguments.checkpoint
    stream = Stream(store)
    info, schema = stream.load()
    successor = stream.successor()
    claimed = checkpoint = None
    if folder is not None:
        from torch_delta.cli import examine

        claimed = examine.claimed_version(folder, info.stream_id)
    total_bytes = sum(item.size_bytes for prefix in (PARTS_PREFIX, ANCHORS_PREFIX) for item in store.list(prefix))
    with output.progress("reading the stream", total_bytes) as advance:
        keep = frozenset() if claimed is None else frozenset({claimed})
        proof = Prover(stream, keep=keep, advance=advance, full=arguments.full).run()
    if folder is not None:
        checkpoint = examine.examine(folder, schema, proof, claimed, output)
    ok = not proof.problems and (checkpoint is None or not checkpoint["differences"])
    record = {
        "url": store.url,
        "stream_id": info.stream_id,
        "ok": ok,
        "full": arguments.full,
        "first": proof.first,
        "last": proof.last,
        "num_parts": proof.num_parts,
        "checked_bytes": proof.checked_bytes,
        "anchors": proof.anchors,
        "unproved": proof.unproved,
        "num_unreferenced": proof.num_unreferenced,
        "unreferenced_bytes": proof.unreferenced_bytes,
        "successor": None if successor is None else successor.root,
        "problems": [asdict(problem) for problem in proof.problems],
        "checkpoint": checkpoint,
    }
    output.record(record)
    _show(output, record)
    return OK if ok else PROBLEM


def _show(output: Output, record: dict[str, Any]) -> None:
    output.line(f"stream {record['stream_id']} at {record['url']}", style="bold")
    versions = f"versions {record['first']} to {record['last']}" if record["first"] <= record["last"] else "no versions"
    output.line(f"{versions}, {counted(record['num_parts'], 'part')}, {human_bytes(record['checked_bytes'])} read")
    if record["anchors"]:
        output.line(f"anchors: {', '.join(map(str, record['anchors']))}")
    if record["unproved"]:
        output.line(f"states not derived (no known one before them): {_ranges(record['unproved'])}", style="yellow")
    if record["num_unreferenced"]:
        size = human_bytes(record["unreferenced_bytes"])
        output.line(
            f"{counted(record['num_unreferenced'], 'part')} ({size}) of no version: left by failed or unfinished ones"
        )
    if record["successor"]:
        output.line(f"continued at {record['successor']}", style="yellow")
    for problem in record["problems"]:
        output.line(f"PROBLEM {problem['message']}", style="red")
    _show_checkpoint(output, record["checkpoint"])
    output.line("OK" if record["ok"] else "NOT OK", style="bold green" if record["ok"] else "bold red")


def _show_checkpoint(output: Output, entry: dict[str, Any] | None) -> None:
    if entry is None:
        return
    claim = "" if entry["claimed_version"] is None else f" (says version {entry['claimed_version']})"
    if not entry["differences"]:
        output.line(f"{entry['path']}{claim} is version {entry['version']}, bit for bit")
        return
    against = "" if entry["compared_with"] is None else f", compared with version {entry['compared_with']}"
    is_other = f"is version {entry['version']}" if entry["version"] is not None else "is no version of this stream"
    output.line(f"PROBLEM {entry['path']}{claim} {is_other}{against}:", style="red")
    for text in entry["differences"][:_TENSORS_SHOWN]:
        output.line(f"  {text}", style="red")
    if (more := len(entry["differences"]) - _TENSORS_SHOWN) > 0:
        output.line(f"  and {more} more", style="red")


def _ranges(versions: list[int]) -> str:
    """``3-7, 9``: ascending numbers, runs joined."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
