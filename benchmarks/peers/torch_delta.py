"""torch_delta through its public surface: a walk over full tensors, published to a directory and followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors.torch import load_file

from peers import folder_bytes
from torch_delta import Follower, LocalCheckpoint, PublishConfig, TensorSource, attach_source, open_store
from torch_delta.publish.base import open_base

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch


class TorchDelta:
    """A Publisher and a Follower on one directory.

    Args:
        base: folder of the base checkpoint.
        work: empty folder for the stream and the local checkpoint.
        num_threads: that compare and that encode. The receiving side takes up to four, as many as the machine has cores.
        follow_fsync: False leaves out the fsyncs of the receiving side, as SkyRL does: its checkpoint then survives
            killed processes, but not a power cut. Publishing makes everything durable either way, as SkyRL's does.
    """

    def __init__(self, base: Path, work: Path, *, num_threads: int, follow_fsync: bool) -> None:
        self.name = "torch_delta" if follow_fsync else "torch_delta, follow unsynced"
        self._stream = work / "stream"
        store = open_store(self._stream)
        self._weights: Mapping[str, torch.Tensor] = load_file(base / "model.safetensors")
        self._publisher = attach_source(
            TensorSource(self._walk, open_base(base).schema, num_threads=num_threads),
            store,
            base=base,
            config=PublishConfig(num_encode_threads=num_threads),
        )
        self._store = store
        self._checkpoint = LocalCheckpoint(work / "local", base=base, fsync=follow_fsync)
        self._follower = Follower(store)

    def publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._publisher.wait(self._publisher.publish())

    def _walk(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._weights.items()

    def follow(self) -> None:
        for _ in self._follower.apply_to(self._checkpoint, until=self._publisher.version):
            pass

    def wire_bytes(self) -> int:
        version = f"{self._publisher.version:020d}"
        return (
            folder_bytes(self._stream / "parts" / version)
            + (self._stream / "commits" / f"{version}.json").stat().st_size
        )

    def checkpoint(self) -> Path:
        return self._checkpoint.path

    def close(self) -> None:
        self._publisher.close()
        self._follower.close()
        self._store.close()
