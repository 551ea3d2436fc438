"""The calls into vLLM's engine that our routes make, through its own client. vLLM is imported where a call needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Calls(Protocol):
    """What the routes need of an engine. All on the server's event loop."""

    async def workers(self, method: str, argument: Mapping[str, object] | None = None) -> list[Any]:
        """Call a quick method of every worker; replies in the order of ranks."""

    async def init(self, init_info: Mapping[str, object]) -> None:
        """Initialise the weight transfer."""

    async def is_paused(self) -> bool:
        """Whether the scheduler is paused, by whomever."""

    async def pause(self) -> None:
        """Freeze requests where they are and drop cached values."""

    async def resume(self) -> None:
        """Let them go on."""

    async def start(self) -> None:
        """Open an update session."""

    async def update(self, update_info: Mapping[str, object]) -> None:
        """Write the weights."""

    async def finish(self, label: str | None) -> None:
        """Close the session; the label becomes the version that vLLM reports."""

    async def reset_caches(self) -> bool:
        """Drop values computed with older weights; whether that was done."""


class EngineCalls:
    """`Calls` on a vLLM engine client.

    Args:
        client: vLLM's `EngineClient`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    async def workers(self, method: str, argument: Mapping[str, object] | None = None) -> list[Any]:
        """See `Calls.workers`. Without a timeout: after one, vLLM hands the late reply to the next call."""
        arguments = () if argument is None else (dict(argument),)
        return list(await self._client.collective_rpc(method, args=arguments))

    async def init(self, init_info: Mapping[str, object]) -> None:
        """See `Calls.init`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._client.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init_info)))

    async def is_paused(self) -> bool:
        """See `Calls.is_paused`."""
        return bool(await self._client.is_paused())

    async def pause(self) -> None:
        """See `Calls.pause`. The mode is named: the default aborts every request in flight (F111)."""
        await self._client.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        """See `Calls.resume`."""
        await self._client.resume_generation()

    async def start(self) -> None:
        """See `Calls.start`."""
        await self._client.start_weight_update()

    async def update(self, update_info: Mapping[str, object]) -> None:
        """See `Calls.update`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._client.update_weights(WeightTransferUpdateRequest(update_info=dict(update_info)))

    async def finish(self, label: str | None) -> None:
        """See `Calls.finish`."""
        await self._client.finish_weight_update(label)

    async def reset_caches(self) -> bool:
        """See `Calls.reset_caches`. Of running requests too: refused otherwise; the engine computes them again."""
        return bool(await self._client.reset_prefix_cache(True, True))


def why_not(client: Any) -> str | None:
    """Why this server cannot be updated through our routes, or None.

    Both cases would break the promise that a version is reported only when every worker has verified it: other API
    processes are not kept from resuming, and vLLM's client returns the replies of one engine of several.
    """
    if client is None:
        return "this server has no engine"
    parallel = client.vllm_config.parallel_config
    if getattr(parallel, "_api_process_count", 1) > 1:
        return "several API processes cannot keep each other from resuming; start the server with --api-server-count 1"
    if parallel.data_parallel_size > 1:
        return "data-parallel replicas inside one server cannot be asked one by one; start one server per replica"
    config = client.vllm_config.weight_transfer_config
    if config is None or config.backend != "torch_delta":
        return """start the server with --weight-transfer-config '{"backend": "torch_delta"}'"""
    return None
