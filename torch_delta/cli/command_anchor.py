"""`torch-delta anchor`: a full copy of a version, uploaded from a checkpoint folder that follows the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.cli.output import counted, human_bytes
from torch_delta.cli.run import OK
from torch_delta.receive import LocalCheckpoint
from torch_delta.receive.anchoring import upload_anchor
from torch_delta.stream import Stream

if TYPE_CHECKING:
    import argparse

    from torch_delta.cli.output import Output
    from torch_delta.store import Store


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Upload `arguments.path` as an anchor of the version it is at."""
    stream = Stream(store)
    stream.load()
    with output.working(f"opening {arguments.path}"):
        checkpoint = LocalCheckpoint(arguments.path, timeout_s=arguments.timeout)
    with checkpoint:
        size_bytes = sum(path.stat().st_size for path in checkpoint.path.glob("*.safetensors"))
        with output.progress("uploading the anchor", size_bytes) as advance:
            manifest = upload_anchor(checkpoint, stream, timeout_s=arguments.timeout, on_bytes=advance)
    stored_bytes = sum(file.stored_bytes for file in manifest.files)
    output.record(
        {
            "url": store.url,
            "path": str(checkpoint.path),
            "version": manifest.version,
            "manifest_key": manifest.key,
            "num_files": len(manifest.files),
            "stored_bytes": stored_bytes,
        }
    )
    size = f"{counted(len(manifest.files), 'file')}, {human_bytes(stored_bytes)}"
    output.line(f"version {manifest.version} has an anchor: {manifest.key} ({size})", style="bold green")
    return OK
