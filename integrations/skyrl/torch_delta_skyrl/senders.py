"""SkyRL 0.3.0's pair of strategy and sender: its chunks, our publisher, its client.

    driver: /pause ──► every rank: send_chunks ──► driver: /resume
                         rank 0   /resume
                         every    compare ─ encode ─ upload, rank 0 commits
                         rank 0   /fetch_weights ─ /pause ─ /start_weight_update ─ /update_weights ─ /finish_...

0.3.0 pauses around all of it. Until the weights are written nothing needs a pause, so that servers generate meanwhile.

Servers are those of `torch_delta_skyrl.contract.ENGINES`: 0.3.0's own do not run on a vLLM that can receive.

A sender is given gathered tensors and not the model: every rank compares a share of whole tensors.

Imports SkyRL, so that only the function that chooses the strategy, which knows this module by name, loads it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from skyrl.backends.skyrl_train.weight_sync.transfer_strategy import (
    WeightSyncInitInfo,
    WeightTransferSender,
    WeightTransferStrategy,
)

from torch_delta.errors import CaptureError
from torch_delta_skyrl import contract
from torch_delta_skyrl.environment import DeltaSettings
from torch_delta_skyrl.publishing import WeightPublisher
from torch_delta_skyrl.requests import fetch_payload, init_payload, update_payload
from torch_delta_skyrl.settings import publish_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch_delta.events import PublishReport


@dataclass
class DeltaInitInfo(WeightSyncInitInfo):  # type: ignore[misc, unused-ignore]
    """What servers are told. SkyRL's base class, so that it is neither frozen nor keyword-only."""

    settings: DeltaSettings
    """Of the run."""

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[DeltaInitInfo]:
        """The same for each: servers of a stream know nothing of each other."""
        del world_size_per_server, dp_size
        return [self] * num_servers

    def to_api_payload(self) -> dict[str, Any]:
        """The body of the init request."""
        return init_payload(
            stream=self.settings.sync_dir,
            base_model_path=self.settings.base_model_path,
            local_checkpoint_dir=self.settings.local_checkpoint_dir,
        )


class DeltaTransferStrategy(WeightTransferStrategy):  # type: ignore[misc, unused-ignore]
    """What SkyRL makes its senders with, for `weight_sync_backend="delta"`."""

    @staticmethod
    def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> DeltaInitInfo:
        """Read the run's settings from the environment; on every rank.

        Raises:
            UnsupportedFormat: a SkyRL in which something that is used has moved.
            RequestRefused: a variable is missing or makes no sense.
        """
        del inference_world_size
        contract.check_seams()
        settings = DeltaSettings.from_environment()
        publish_config(settings)  # refuses now rather than at the first send
        return DeltaInitInfo(override_existing_receiver=not ie_cfg.run_engines_locally, settings=settings)

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """The engine on the servers' side."""
        from torch_delta_skyrl.receiver import ReceiverEngine

        return ReceiverEngine

    @staticmethod
    def create_sender(init_info: DeltaInitInfo, inference_client: Any) -> DeltaSender:
        """A rank's sender; on every rank."""
        return DeltaSender(init_info.settings, inference_client)


class DeltaSender(WeightTransferSender):  # type: ignore[misc, unused-ignore]
    """Publishes this rank's share of each version, and on rank 0 drives the servers to it.

    Threads: one send at a time; publishing, with the gathers of SkyRL's chunks, happens in a worker thread.

    Args:
        settings: of the run.
        client: SkyRL's `RemoteInferenceClient`; used on rank 0.
    """

    def __init__(self, settings: DeltaSettings, client: Any) -> None:
        self._settings = settings
        self._client = client
        self._chunks = Chunks()
        self._publisher = WeightPublisher(
            self._chunks,
            sync_dir=settings.sync_dir,
            base_model_path=settings.base_model_path,
            staging_dir=settings.publish_staging_dir,
            config=publish_config(settings),
            compare_shards=False,
        )

    @property
    def version(self) -> int:
        """The version of the last send; 0 before the first one of a new stream."""
        return self._publisher.version

    @property
    def report(self) -> PublishReport | None:
        """Of the last send."""
        return self._publisher.report

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: dict[str, list[Any]] | None = None) -> None:
        """Publish a version from all ranks and bring every server to it. Called by every rank.

        Args:
            chunks: SkyRL's `WeightChunk`s of all tensors; iterated once, to the end, on every rank.
            weight_metadata: not needed.

        Raises:
            PublishFailed: not committed, on every rank; the next send covers the changes.
            TorchDeltaError: see `torch_delta.attach_source`, for the first send.
            RuntimeError: a server refused; on rank 0, as with SkyRL's own senders. SkyRL resumes generation.
        """
        del weight_metadata
        is_first = torch.distributed.get_rank() == 0
        if is_first:
            await self._client.resume_generation()
        self._chunks.next_ones(chunks)
        version = await asyncio.to_thread(self._publisher.publish)
        if is_first:
            await self._bring_servers(version)
        torch.distributed.barrier()

    async def _bring_servers(self, version: int) -> None:
        client, stream = self._client, self._settings.sync_dir
        ask = client._call_all_servers
        await ask("/fetch_weights", fetch_payload(stream, version))
        await client.pause_generation()
        await ask("/start_weight_update")
        await client.update_named_weights(update_payload(stream, version))
        await ask("/finish_weight_update")

    def teardown(self) -> None:
        """End the publisher; on every rank."""
        self._publisher.close()


class Chunks:
    """SkyRL's chunks as tensors with names; each send brings new ones, which can be iterated once."""

    def __init__(self) -> None:
        self._next: Iterable[Any] | None = None

    def next_ones(self, chunks: Iterable[Any]) -> None:
        """What is iterated next."""
        self._next = chunks

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors."""
        chunks, self._next = self._next, None
        if chunks is None:
            raise CaptureError("the chunks of this send were iterated already; they can be gathered only once")
        for chunk in chunks:
            yield from zip(chunk.names, chunk.tensors, strict=True)
