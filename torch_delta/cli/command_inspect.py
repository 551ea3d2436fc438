"""`torch-delta inspect`: what a version, or one object of a stream, is made of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch_delta.cli.output import counted, human_bytes, share, times_smaller
from torch_delta.cli.run import OK
from torch_delta.errors import ChainError, FormatError
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.keys import (
    COMMITS_PREFIX,
    PARTS_PREFIX,
    commit_key,
    parse_commit_key,
    parse_part_key,
    validate_key,
)
from torch_delta.format.limits import MAX_JSON_BYTES
from torch_delta.format.part import parse_part
from torch_delta.format.sealed import load_json, unseal
from torch_delta.stream import Stream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch_delta.cli.output import Output
    from torch_delta.format.commit import Commit
    from torch_delta.format.part import Frame, Part, Slice
    from torch_delta.format.schema import Schema
    from torch_delta.store import Store

_FRAME_HEADINGS = ("frame", "encoding", "slices", "changed", "stored", "bits/changed", "x smaller")
_SLICE_HEADINGS = ("tensor", "dtype", "box", "frame", "changed", "% of box")


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Show `arguments.what`: a version, or the object with this key."""
    what: str = arguments.what
    stream = Stream(store)
    _, schema = stream.load()
    if what.isdecimal() or what.startswith(COMMITS_PREFIX):
        if what.isdecimal() and not int(what):
            raise ChainError(
                f"{store.url}: version 0 is the base, which has no commit; "
                f"`torch-delta inspect {store.url} stream.json` shows what it is",
                target=0,
            )
        commit, sha256 = stream.commit(int(what) if what.isdecimal() else parse_commit_key(what))
        parts = [_read_part(store, schema, ref.key, ref.stored_bytes) for ref in commit.parts]
        output.record({**_commit_entry(commit, sha256), "parts": [_part_entry(part, schema) for part in parts]})
        _show_commit(output, commit, sha256, schema)
    elif validate_key(what).startswith(PARTS_PREFIX):
        parse_part_key(what)
        parts = [_read_part(store, schema, what, None)]
        output.record(_part_entry(parts[0], schema))
    else:
        parts = []
        value = _json_object(store.get(what, max_bytes=MAX_JSON_BYTES), what)
        output.record(value)
        output.line(json.dumps(value, indent=2))
    for part in parts:
        _show_part(output, part, schema, arguments.slices)
    return OK


def _read_part(store: Store, schema: Schema, key: str, max_bytes: int | None) -> Part:
    return parse_part(store.get(key, max_bytes=max_bytes), schema=schema, key=key)


def _json_object(data: bytes, key: str) -> dict[str, Any]:
    """The content of any JSON object of a stream: sealed, or the schema, whose key is its hash."""
    try:
        return unseal(data, key=key)
    except FormatError:
        if not key.startswith("schema/"):
            raise
        return load_json(data, key=key)


def _commit_entry(commit: Commit, sha256: str) -> dict[str, Any]:
    return {
        "key": commit_key(commit.version),
        "version": commit.version,
        "commit_sha256": sha256,
        "parent_sha256": commit.parent_sha256,
        "state_sha256": commit.state_sha256,
        "num_changed": commit.num_changed,
        "stored_bytes": sum(ref.stored_bytes for ref in commit.parts),
        "info": dict(commit.info),
    }


def _part_entry(part: Part, schema: Schema) -> dict[str, Any]:
    return {
        "key": part.key,
        "version": part.header.version,
        "rank": part.header.rank,
        "seq": part.header.seq,
        "frames": [
            {
                "encoding": frame.encoding,
                "stored_bytes": _payload_bytes(part, frame),
                "slices": [_slice_entry(item, schema) for item in frame.slices],
            }
            for frame in part.frames
        ],
    }


def _slice_entry(item: Slice, schema: Schema) -> dict[str, Any]:
    spec = schema.tensors[item.tensor]
    return {
        "tensor": spec.name,
        "dtype": spec.dtype,
        "offset": list(item.box.offset),
        "shape": list(item.box.shape),
        "num_changed": item.count,
        "increment": item.increment.hex(),
    }


def _payload_bytes(part: Part, frame: Frame) -> int:
    return sum(view.nbytes for view in part.payload(frame).values())


def _show_commit(output: Output, commit: Commit, sha256: str, schema: Schema) -> None:
    specs = [schema.tensors[index] for index in schema.data_indices]
    num_elements, full_bytes = sum(spec.numel for spec in specs), sum(spec.nbytes for spec in specs)
    stored_bytes = sum(ref.stored_bytes for ref in commit.parts)
    output.line(f"version {commit.version}", style="bold")
    output.line(f"commit   {sha256}")
    output.line(f"parent   {commit.parent_sha256}")
    output.line(f"state    {commit.state_sha256}")
    output.line(f"changed  {commit.num_changed:,} of {num_elements:,} ({share(commit.num_changed, num_elements)})")
    output.line(
        f"stored   {stored_bytes:,} bytes in {counted(len(commit.parts), 'part')}, "
        f"{times_smaller(full_bytes, stored_bytes)} times smaller than a full copy"
    )
    for name, value in sorted(commit.info.items()):
        output.line(f"{name:8} {value}")


def _show_part(output: Output, part: Part, schema: Schema, num_slices: int) -> None:
    total_bytes = sum(_payload_bytes(part, frame) for frame in part.frames)
    output.line()
    output.line(part.key, style="bold")
    output.line(
        f"rank {part.header.rank}: {counted(part.num_slices, 'slice')}, {counted(part.num_changed, 'element')}, "
        f"{human_bytes(total_bytes)} of payload"
    )
    output.table(_FRAME_HEADINGS, [_frame_row(at, part, frame, schema) for at, frame in enumerate(part.frames)])
    rows = [(at, item) for at, frame in enumerate(part.frames) for item in frame.slices]
    rows.sort(key=lambda row: -row[1].count)
    shown = rows[: num_slices or None]
    output.line()
    output.table(_SLICE_HEADINGS, [_slice_row(at, item, schema) for at, item in shown], left=3)
    if len(shown) < len(rows):
        output.line(f"and {counted(len(rows) - len(shown), 'slice')} with fewer changes; --slices 0 shows all")


def _frame_row(at: int, part: Part, frame: Frame, schema: Schema) -> Sequence[str]:
    num_changed = sum(item.count for item in frame.slices)
    stored_bytes = _payload_bytes(part, frame)
    box_bytes = sum(item.box.numel * ITEMSIZE[schema.tensors[item.tensor].dtype] for item in frame.slices)
    return (
        str(at),
        frame.encoding,
        f"{len(frame.slices):,}",
        f"{num_changed:,}",
        human_bytes(stored_bytes),
        f"{8 * stored_bytes / num_changed:.1f}",
        times_smaller(box_bytes, stored_bytes),
    )


def _slice_row(at: int, item: Slice, schema: Schema) -> Sequence[str]:
    spec = schema.tensors[item.tensor]
    if item.box.is_whole(spec):
        box = "whole " + "x".join(map(str, spec.shape))
    else:
        box = ", ".join(f"{start}:{start + size}" for start, size in zip(item.box.offset, item.box.shape, strict=True))
    return spec.name, spec.dtype, box, str(at), f"{item.count:,}", share(item.count, item.box.numel)
