"""The trainer engine that SkyRL builds on every rank for its `delta` backend: SkyRL's round, our publisher.

SkyRL's own engine is the base class, so that its client protocol stays SkyRL's: fetch on every server before the pause,
then pause, prefix cache, start, update, finish, resume. What differs is who publishes: every rank, its own share.

Imports vLLM and SkyRL, so that only the factory, which knows this module by name, loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from skyrl.backends.skyrl_train.weight_sync.delta.trainer import DeltaTrainerWeightTransferEngine

from torch_delta.errors import CaptureError, RequestRefused
from torch_delta_skyrl import contract
from torch_delta_skyrl.publishing import WeightPublisher
from torch_delta_skyrl.requests import init_payload, update_payload
from torch_delta_skyrl.settings import publish_config

if TYPE_CHECKING:
    from torch_delta.config import PublishConfig
    from torch_delta.events import PublishReport


class TrainerEngine(DeltaTrainerWeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """Publishes this rank's share of each version, and on rank 0 drives the servers to it.

    Threads: one at a time; SkyRL calls from a worker thread while training stands still.
    """

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """Check what was configured, and let the servers know which stream to follow. Called on every rank.

        Args:
            init_info: SkyRL's `DeltaTrainerInitInfo`.
            client: SkyRL's control-plane client.
            source: this rank's weights; None on a rank other than the sender that cannot iterate them.

        Raises:
            UnsupportedFormat: a SkyRL in which something that is used has moved.
            RequestRefused: a setting without a counterpart.
            CaptureError: the sender has no source, or ranks iterate different tensors.
        """
        contract.check_seams()
        config = publish_config(init_info)
        if source is None and init_info.is_sender:
            raise CaptureError("delta weight sync: the sending rank has no WeightSource; there is nothing to publish")
        held = None if source is None else source.held_names()
        if held is not None:
            raise CaptureError(
                f"this source yields {len(held)} of the model's tensors on this rank and None for the rest, as for "
                "sharded RDT; delta weight sync needs one that yields all of them on every rank that has one"
            )
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, init_info=init_info)
        engine.use(config)
        if engine.is_sender:
            client.init_weight_transfer_engine(
                init_payload(
                    stream=init_info.sync_dir,
                    base_model_path=init_info.base_model_path,
                    local_checkpoint_dir=init_info.local_checkpoint_dir,
                )
            )
        return engine

    def use(self, config: PublishConfig) -> None:
        """Settings of the publisher, which is made at the first send: only then are weights sure to be in place."""
        self._publisher: WeightPublisher | None = None
        self._publish_config = config

    @property
    def version(self) -> int:
        """The version of the last send; 0 before the first one of a new stream."""
        return 0 if self._publisher is None else self._publisher.version

    @property
    def report(self) -> PublishReport | None:
        """Of the last send."""
        return None if self._publisher is None else self._publisher.report

    def send_weights(self) -> None:
        """Publish a version from all ranks and bring every server to it. Called by every rank.

        Raises:
            PublishFailed: not committed, on every rank; the next send covers the changes.
            TorchDeltaError: see `torch_delta.attach_source`, for the first send.
            RuntimeError: a server refused; on rank 0, as with SkyRL's own engine. Generation is resumed.
        """
        if self.skyrl_draft_source is not None:
            raise RequestRefused(
                "torch_delta does not update draft models of speculative decoding; serve without speculative_config, "
                "or leave torch_delta_skyrl out"
            )
        if self._publisher is None:
            self._publisher = WeightPublisher(
                self.source,
                sync_dir=self._init_info.sync_dir,
                base_model_path=self._init_info.base_model_path,
                staging_dir=self._init_info.publish_staging_dir,
                config=self._publish_config,
            )
        version = self._publisher.publish()
        if self.is_sender:
            self._apply_receiver_update(update_payload(self._init_info.sync_dir, version))

    def shutdown(self) -> None:
        """End the publisher; on every rank."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
