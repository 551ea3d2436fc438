"""Which version of a stream a checkpoint folder is, by digesting every weight in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch_delta.errors import BaseMismatch
from torch_delta.format.digest import state_sha256
from torch_delta.receive import LocalCheckpoint
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.state import HIDDEN
from torch_delta.receive.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch_delta.cli.output import Output
    from torch_delta.cli.proof import Proof
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema


def claimed_version(folder: Path, stream_id: str) -> int | None:
    """The version of this stream that a folder says it is at, if it follows one.

    Raises:
        BaseMismatch: it follows another stream.
    """
    if not (folder / HIDDEN).is_dir():
        return None
    with LocalCheckpoint(folder) as checkpoint:
        if checkpoint.stream_id not in {None, stream_id}:
            raise BaseMismatch(f"{folder} follows stream {checkpoint.stream_id}, this one is {stream_id}", tensors=())
        return checkpoint.version


def examine(folder: Path, schema: Schema, proof: Proof, claimed: int | None, output: Output) -> dict[str, Any]:
    """Digest every weight at rest in `folder` and find the version it is.

    Returns:
        The `checkpoint` entry of the JSON output; `differences` is empty if the folder is a version of the stream, and
        the one it claims to be.
    """
    with _held_still(folder):
        weight_files = SafetensorsFolder.open(folder)
        entry: dict[str, Any] = {
            "path": str(folder),
            "claimed_version": claimed,
            "version": None,
            "compared_with": None,
            "differences": weight_files.differences(schema),
        }
        if entry["differences"]:
            return entry
        total_bytes = sum(schema.tensors[index].nbytes for index in schema.data_indices)
        with (
            Weights(weight_files, schema, writable=False) as weights,
            output.progress("digesting the checkpoint", total_bytes) as advance,
        ):
            got = []
            for index in schema.data_indices:
                got += weights.digests([index])
                advance(schema.tensors[index].nbytes)
    entry["version"] = proof.states.get(state_sha256(got))
    if entry["version"] is None or claimed not in {None, entry["version"]}:
        compared = claimed if claimed in proof.digests else max(proof.digests, default=None)
        entry["compared_with"] = compared
        entry["differences"] = _differences(schema, got, proof.digests.get(compared) if compared is not None else None)
    return entry


def _differences(schema: Schema, got: list[Digest], expected: tuple[Digest, ...] | None) -> list[str]:
    if expected is None:
        return ["the weights are no version of the stream, and no version's digests are proved"]
    pairs = zip(schema.data_indices, got, expected, strict=True)
    return [f"{schema.tensors[index].name}: other bits" for index, digest, wanted in pairs if digest != wanted]


@contextlib.contextmanager
def _held_still(folder: Path) -> Iterator[None]:
    """Keep followers of this host from writing to the folder meanwhile, if it is one that they write to."""
    with contextlib.ExitStack() as stack:
        if (folder / HIDDEN).is_dir():
            checkpoint = stack.enter_context(LocalCheckpoint(folder))
            stack.enter_context(checkpoint.reading())
        yield
