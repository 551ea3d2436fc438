"""torch_delta through its public surface: a walk over full tensors, published to a directory and followed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from peers import folder_bytes
from torch_delta import Follower, LocalCheckpoint, PublishConfig, TensorSource, attach_source, open_store
from torch_delta.publish.base import open_base

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from torch_delta.config import Profile


class TorchDelta:
    """A Publisher and two Followers on one directory: one that fsyncs as it does by default, and one that does not.

    Publishing makes everything durable either way, as SkyRL's publisher does.

    Args:
        base: folder of the base checkpoint.
        work: empty folder for the stream and the local checkpoints.
        num_threads: that encode. The receiving side takes up to four, as many as the machine has cores.
        url: of the stream; None for a directory in `work`.
        profile: of the `packed` encoding.
    """

    def __init__(
        self, base: Path, work: Path, *, num_threads: int, url: str | None = None, profile: Profile = "auto"
    ) -> None:
        self.name = "torch_delta" if profile == "auto" else f"torch_delta {profile}"
        self._stream = work / "stream"
        self._store = open_store(self._stream if url is None else url)
        self._weights: Mapping[str, torch.Tensor] = load_file(base / "model.safetensors")
        self._publisher = attach_source(
            TensorSource(self._walk, open_base(base).schema),
            self._store,
            base=base,
            config=PublishConfig(num_encode_threads=num_threads, profile=profile, anchor_first=False),
        )
        self._follower = Follower(self._store)
        self._local = {
            self.name: LocalCheckpoint(work / "local", base=base),
            f"{self.name} (no fsync)": LocalCheckpoint(work / "local-unsynced", base=base, fsync=False),
        }
        self.followers = {title: partial(self._follow, checkpoint) for title, checkpoint in self._local.items()}

    def publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._publisher.wait(self._publisher.publish())

    def _walk(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._weights.items()

    def _follow(self, checkpoint: LocalCheckpoint) -> None:
        for _ in self._follower.apply_to(checkpoint, until=self._publisher.version):
            pass

    def poll(self) -> None:
        """What a follower that waits does again and again."""
        assert self._follower.stream.head(self._publisher.version) == self._publisher.version

    def wire_bytes(self) -> int:
        version = f"{self._publisher.version:020d}"
        commit = self._stream / "commits" / f"{version}.json"
        return folder_bytes(self._stream / "parts" / version) + commit.stat().st_size

    def checkpoints(self) -> Mapping[str, Path]:
        return {title: checkpoint.path for title, checkpoint in self._local.items()}

    def close(self) -> None:
        self._publisher.close()
        self._follower.close()
        self._store.close()
