"""The engines that make tokens, as a synchronisation sees them: servers behind HTTP, or one engine per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch_delta.vllm import Fleet
from torch_delta_trl.report import Delivery

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta.vllm.fleet.reports import FleetReport


class Receivers(Protocol):
    """Engines of one training job. Called on the training thread."""

    on_every_rank: bool
    """Whether each rank has its own engine; else rank 0 alone calls `update`."""
    timeout_s: float
    """Longest an update can take by its own deadlines, seconds."""

    @property
    def asleep(self) -> bool:
        """Whether the engines' weights have no memory now: nothing can be delivered."""
        ...

    def update(self, version: int, *, lost: bool = False) -> Delivery:
        """Bring every engine to a committed version; returns when they serve it, and never leaves one paused.

        Args:
            version: of the stream.
            lost: the engines' weights were thrown away (sleep level 2): take everything again.

        Raises:
            TorchDeltaError: they serve what they served before.
        """
        ...

    def close(self) -> None:
        """Let go of the engines; they go on serving."""
        ...


class FleetReceivers:
    """vLLM servers behind HTTP, controlled from rank 0."""

    on_every_rank = False
    asleep = False  # TRL puts engines of its own process to sleep, and no others

    def __init__(
        self,
        urls: Sequence[str],
        stream: str | None,
        *,
        token: str | None,
        config: FleetConfig | None,
        init_info: Mapping[str, object] | None,
    ) -> None:
        self.fleet = Fleet(urls, token=token, stream=stream, config=config, init_info=init_info)
        limits = self.fleet.config
        self.timeout_s = limits.prepare_timeout_s + limits.apply_timeout_s + 4 * limits.status_timeout_s

    def update(self, version: int, *, lost: bool = False) -> Delivery:
        """See `Receivers.update`; TRL's server mode never loses weights."""
        assert not lost, "servers do not sleep"
        report = self.fleet.update(version)
        return Delivery(
            prepare_s=max((one.init_s + one.prepare_s for one in report.reports.values()), default=0.0),
            pause_s=report.pause_s,
            num_servers=len(report.reports),
            num_behind=len(report.failures),
            oldest_version=self._oldest(report, version),
        )

    def _oldest(self, report: FleetReport, version: int) -> int:
        """Looks at every server only if some are behind."""
        if not report.failures:
            return version
        known = [server.version for server in self.fleet.status().servers.values() if server.version is not None]
        return min([version, *known])

    def close(self) -> None:
        """See `Receivers.close`."""
        self.fleet.close()


def url_of(trainer: Any) -> str:
    """The server a trainer was configured with, as TRL resolves it."""
    args = trainer.args
    if args.vllm_server_base_url is not None:
        return str(args.vllm_server_base_url).rstrip("/")
    return f"http://{args.vllm_server_host}:{args.vllm_server_port}"
