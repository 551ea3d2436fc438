"""SkyRL 0.4.0's own delta publisher and local checkpoint store, unmodified, from its wheel.

What it makes durable (read from its code): publishing to a directory fsyncs each payload file and the manifest, and
after each the folder of the version (not the folder above, which holds the new folder's name). The receiving side
copies files, patches the checkpoint through mmap and rewrites its state file without any fsync.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from peers import folder_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch


def missing() -> str | None:
    """Why SkyRL cannot run here, or None when it can."""
    try:
        _checkpoint_module()
    except ImportError as error:
        return f"SkyRL is not importable ({error}); benchmarks/skyrl_env.sh makes an environment that has it"
    return None


def _checkpoint_module():
    if sys.version_info < (3, 12):
        # Its package asks for 3.12 only because pydantic wants typing_extensions' TypedDict before that.
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    from skyrl.backends.skyrl_train.weight_sync.delta import checkpoint

    return checkpoint


class SkyRL:
    """DeltaCheckpointPublisher and LocalCheckpointStore on one shared folder.

    Args:
        base: folder of the base checkpoint.
        work: empty folder for the stream, the staging files and the local checkpoint.
        num_threads: workers of the publisher. The receiving side takes as many as the machine has cores.
    """

    name = "SkyRL"

    def __init__(self, base: Path, work: Path, *, num_threads: int) -> None:
        checkpoint = _checkpoint_module()
        self._sync = work / "sync"
        self._local = work / "local"
        self._publisher = checkpoint.DeltaCheckpointPublisher(
            base_model_path=str(base),
            sync_dir=str(self._sync),
            publish_staging_dir=str(work / "staging"),
            publish_num_workers=num_threads,
        )
        self._store = checkpoint.LocalCheckpointStore(str(base), str(self._local))
        self.followers = {self.name: self._follow}

    def publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._publisher.publish(self._publisher.create_delta_files(weights.items()))

    def _follow(self) -> None:
        self._store.fetch(self._publisher.version, sync_dir=str(self._sync))

    def wire_bytes(self) -> int:
        return folder_bytes(self._sync / f"delta-{self._publisher.version:08d}")

    def checkpoints(self) -> Mapping[str, Path]:
        return {self.name: self._local / "weights"}

    def close(self) -> None:
        executor = self._publisher._publish_executor
        if executor is not None:
            executor.shutdown()
