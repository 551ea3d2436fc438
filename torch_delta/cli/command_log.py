"""`torch-delta log`: the versions of a stream, newest last."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_delta.cli.output import human_bytes, human_seconds, share, times_smaller
from torch_delta.cli.run import OK
from torch_delta.stream import Stream

if TYPE_CHECKING:
    import argparse

    from torch_delta.cli.output import Output
    from torch_delta.format.commit import Commit
    from torch_delta.format.schema import Schema
    from torch_delta.store import Store

_HEADINGS = ("version", "changed", "% changed", "stored", "x smaller", "parts", "step", "age", "anchor")


@dataclass(frozen=True, slots=True)
class Size:
    """What a full copy of the state has."""

    num_tensors: int
    num_elements: int
    full_bytes: int


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """List the newest `arguments.last` versions."""
    stream = Stream(store)
    info, schema = stream.load()
    size = size_of(schema)
    head = stream.head()
    successor = stream.successor()
    anchors = sorted({anchor.version for anchor in stream.anchors()})
    first, last = stream.available() or (1, 0)
    start = max(first, last - arguments.last + 1) if arguments.last else first
    versions = []
    for commit, sha256 in stream.commits(start, last):
        versions.append(_entry(commit, sha256, store.stat(commit.key).modified_s))
    base = {"kind": info.base.kind, "name": info.base.name, "revision": info.base.revision}
    output.record(
        {
            "url": store.url,
            "stream_id": info.stream_id,
            "base": base,
            "absolute_only": info.absolute_only,
            "num_tensors": size.num_tensors,
            "num_elements": size.num_elements,
            "full_bytes": size.full_bytes,
            "head": head,
            "successor": None if successor is None else successor.root,
            "anchors": anchors,
            "versions": versions,
        }
    )
    revision = f" at {info.base.revision}" if info.base.revision else ""
    output.line(f"stream {info.stream_id} at {store.url}", style="bold")
    output.line(f"base   {info.base.kind}: {info.base.name}{revision}")
    output.line(
        f"state  {size.num_tensors:,} tensors, {size.num_elements:,} elements, {human_bytes(size.full_bytes)}; "
        f"head is version {head}\n"
    )
    if successor is not None:
        output.line(f"goes on from version {successor.version} at {successor.root!r} beside it\n", style="yellow")
    output.table(_HEADINGS, [_row(entry, size, entry["version"] in anchors) for entry in versions])
    return OK


def size_of(schema: Schema) -> Size:
    """Count a schema; tied weights once."""
    specs = [schema.tensors[index] for index in schema.data_indices]
    return Size(len(specs), sum(spec.numel for spec in specs), sum(spec.nbytes for spec in specs))


def _entry(commit: Commit, sha256: str, modified_s: float | None) -> dict[str, Any]:
    return {
        "version": commit.version,
        "num_changed": commit.num_changed,
        "stored_bytes": sum(part.stored_bytes for part in commit.parts),
        "num_parts": len(commit.parts),
        "commit_sha256": sha256,
        "modified_s": modified_s,
        "info": dict(commit.info),
    }


def _row(entry: dict[str, Any], size: Size, has_anchor: bool) -> tuple[str, ...]:
    modified_s = entry["modified_s"]
    return (
        str(entry["version"]),
        f"{entry['num_changed']:,}",
        share(entry["num_changed"], size.num_elements),
        human_bytes(entry["stored_bytes"]),
        times_smaller(size.full_bytes, entry["stored_bytes"]),
        str(entry["num_parts"]),
        entry["info"].get("step", "-"),
        # By the store's clock and this host's: good enough to look at, and used for nothing else.
        "-" if modified_s is None else human_seconds(max(0.0, time.time() - modified_s)),
        "yes" if has_anchor else "",
    )
