"""Comparing the weight files with what the state says they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.errors import BaseMismatch, DigestMismatch
from torch_delta.receive.workers import run_all

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.receive.folder import SafetensorsFolder
    from torch_delta.receive.state import State
    from torch_delta.receive.weights import Weights

_NAMES_SHOWN = 10


def check_fit(folder: SafetensorsFolder, schema: Schema, allow_extra: Collection[str]) -> None:
    """Refuse a folder whose tensors are not those of the stream (F11).

    Raises:
        BaseMismatch: names the tensors that are missing, unknown, or of another dtype or shape.
    """
    differences = folder.differences(schema, allow_extra=allow_extra)
    if differences:
        raise BaseMismatch(
            f"{folder.path} does not hold the tensors of the stream ({len(differences)} differ): "
            f"{'; '.join(differences[:_NAMES_SHOWN])}. Use the base the stream was made from, or no base to start from "
            "an anchor; tensors that the stream rightly does not know can be named in allow_extra",
            path=str(folder.path),
            tensors=tuple(line.partition(":")[0] for line in differences),
        )


def wrong_tensors(
    weights: Weights,
    schema: Schema,
    expected: Sequence[Digest],
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """Names of the tensors whose bits at rest do not have the expected digests; reads everything.

    Args:
        weights: the mapped files.
        schema: of the stream.
        expected: of every tensor that is not an alias, in schema order.
        pool: to digest several tensors at once.
        on_bytes: told the bytes of each tensor when it is done, by threads of the pool.
    """

    def digest(index: int) -> Digest:
        found = weights.digests([index])[0]
        on_bytes(schema.tensors[index].nbytes)
        return found

    got = run_all(pool, digest, schema.data_indices)
    pairs = zip(schema.data_indices, got, expected, strict=True)
    return [schema.tensors[index].name for index, digest, wanted in pairs if digest != wanted]


def check_base(root: Path, stream_id: str, wrong: Sequence[str], num_tensors: int) -> None:
    """BaseMismatch for a non-empty list of tensors."""
    if wrong:
        raise BaseMismatch(
            f"{root} is not the base of stream {stream_id}: {len(wrong)} of {num_tensors} tensors have other bits, "
            f"such as {', '.join(wrong[:_NAMES_SHOWN])}. Use the base the stream was made from, or no base in an empty "
            "folder to start from an anchor",
            path=str(root),
            tensors=tuple(wrong),
        )


def check_rest(root: Path, state: State, wrong: Sequence[str]) -> None:
    """DigestMismatch for a non-empty list of tensors."""
    if wrong:
        raise DigestMismatch(
            f"{root}: {len(wrong)} tensors at rest are not version {state.version}, such as "
            f"{', '.join(wrong[:_NAMES_SHOWN])}; something else changed the files. A follower heals this from an "
            "anchor or the base",
            path=str(root),
            tensors=tuple(wrong),
            tensor=wrong[0],
            version=state.version,
        )


def check_damage(root: Path, state: State) -> None:
    """DigestMismatch for a checkpoint whose state says that its weights are damaged."""
    if state.damage:
        raise DigestMismatch(
            f"{root} cannot be used: {state.damage}. A follower heals this from an anchor or the base; else start in "
            "an empty folder",
            path=str(root),
            version=state.version,
            damage=state.damage,
        )
