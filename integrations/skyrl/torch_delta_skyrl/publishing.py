"""Versions of a SkyRL weight source, from all ranks: which way the weights are read, and where the stream stands.

    FSDP2 model at the weights where the stream stands ──► each rank compares its own shards; nothing is gathered
    anything else ──► the source is walked (its collectives run); each rank compares its share of whole tensors

A trainer that starts again, or starts from a checkpoint of a run, holds other weights than the stream's newest version
(or its base). Then those are read from disk as what the first version is compared with, and versions go on counting:
servers and their checkpoints are never taken back.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_delta import TensorSource, attach_source
from torch_delta.errors import BaseMismatch, CaptureError, ObjectNotFound
from torch_delta.publish.base import BaseCheckpoint, open_base
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta_skyrl.shards import fsdp_model, shard_source
from torch_delta_skyrl.ties import walked_schema
from torch_delta_skyrl.walking import Walk

if TYPE_CHECKING:
    from torch import nn

    from torch_delta.config import PublishConfig
    from torch_delta.events import PublishReport
    from torch_delta.format.schema import Schema
    from torch_delta.publish import Publisher

_logger = logging.getLogger("torch_delta")


class WeightPublisher:
    """Publishes a SkyRL weight source. Every method is called by every rank, in the same order.

    Args:
        source: SkyRL's `WeightSource` of this rank; None on ranks that cannot iterate it.
        sync_dir: the stream's URL.
        base_model_path: the checkpoint servers start from: a folder or a Hub id.
        staging_dir: folder on this host for the newest weights of a stream that exists and stands elsewhere.
        config: see `PublishConfig`; the same on every rank.
        compare_shards: look for a model behind the source, whose shards can be compared where they lie.
    """

    def __init__(
        self,
        source: Any,
        *,
        sync_dir: str,
        base_model_path: str,
        staging_dir: str,
        config: PublishConfig,
        compare_shards: bool = True,
    ) -> None:
        self._source = source
        self._sync_dir = sync_dir
        self._base_path = base_model_path
        self._staging_dir = staging_dir
        self._config = config
        self._compare_shards = compare_shards
        self._base: BaseCheckpoint
        self._model: nn.Module | None = None
        self._publisher: Publisher | None = None
        self._is_walking = False
        self.report: PublishReport | None = None

    @property
    def version(self) -> int:
        """The newest committed version; 0 before the first send of a new stream."""
        return 0 if self._publisher is None else self._publisher.version

    @property
    def gathers(self) -> bool:
        """Whether the source is walked, gathering its tensors; False where each rank compares its own shards."""
        return self._is_walking

    def publish(self) -> int:
        """Publish what changed since the last version, and wait until it is committed; nothing changed is a version.

        Returns:
            Its number, the same on every rank.

        Raises:
            PublishFailed: not committed, on every rank; the next call covers the changes.
            TorchDeltaError: see `attach_source`, on the first call.
        """
        if self._publisher is None:
            self._publisher = self._open()
        version = self._publisher.publish()
        self.report = self._publisher.wait(version)
        if self._is_walking and self._model is not None:
            # The weights are those of the version just published, so that shards can be compared from here on.
            self._publisher.close()
            self._publisher = self._attach_shards() or self._attach_walk()
        return version

    def close(self) -> None:
        """Wait for what is in flight and stop; see `Publisher.close`."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _open(self) -> Publisher:
        self._base = open_base(self._base_path)
        self._model = fsdp_model(self._source, self._base.schema) if self._compare_shards else None
        return self._attach_shards() or self._attach_walk()

    def _attach_shards(self) -> Publisher | None:
        """Publish from shards; None, on all ranks, where that is not possible (yet)."""
        if self._model is None:
            return None
        try:
            source = shard_source(self._model, self._base.schema)
            publisher = attach_source(source, self._sync_dir, base=self._base_path, config=self._config)
        except BaseMismatch as error:
            _logger.warning(
                "the weights are not where the stream stands; one version is compared by gathering: %s", error
            )
            if self._is_walking:
                self._model = None
            return None
        except CaptureError as error:
            _logger.warning("shards cannot be compared where they are; every version gathers: %s", error)
            self._model = None
            return None
        self._is_walking = False
        return publisher

    def _attach_walk(self) -> Publisher:
        self._is_walking = True
        schema = walked_schema(self._base, self._stream_schema())
        walk = None if self._source is None else Walk(self._source, self._base, self._reference(), schema)
        source = TensorSource(walk, schema)
        return attach_source(source, self._sync_dir, base=self._base_path, config=self._config)

    def _stream_schema(self) -> Schema | None:
        """Of the stream that is continued; None for a new one. The same on every rank."""
        with Follower(self._sync_dir) as follower:
            try:
                return follower.schema
            except ObjectNotFound:
                return None

    def _reference(self) -> BaseCheckpoint:
        """A checkpoint with the weights at which the stream stands: the base for a new one, else its newest version."""
        with Follower(self._sync_dir) as follower:
            try:
                if follower.head() == 0:
                    return self._base
            except ObjectNotFound:
                return self._base
            with LocalCheckpoint(Path(self._staging_dir) / "head", base=self._base.path) as checkpoint:
                for _ in follower.apply_to(checkpoint, until="head"):
                    pass
                return open_base(checkpoint.path)
