"""What one synchronisation did: for the trainer's log and for a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.events import PublishReport

STANDING = frozenset(
    f"delta/{name}" for name in ("version", "server_version", "staleness", "servers", "servers_behind")
)
"""Metrics that say how things stand, not what one synchronisation cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One version, brought to the engines that make tokens."""

    prepare_s: float
    """Seconds until every engine held the version, verified; they generate meanwhile."""
    pause_s: float
    """Longest pause of any engine, seconds."""
    num_servers: int
    """Engines that run the version."""
    num_behind: int
    """Engines that were left out and are rolled forward later."""
    oldest_version: int
    """Of the engines that are known to run one; the version itself unless some are behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One synchronisation: a version published by all ranks and applied by the engines."""

    step: int
    """The trainer's global step."""
    version: int
    """Of the stream; not the trainer's `model_version`, which counts synchronisations since the run began."""
    published: PublishReport | None
    """None where there was nothing to publish: the first synchronisation of a run, or weights that were lost."""
    delivery: Delivery
    """What the engines did."""
    total_s: float
    """Seconds the training loop waited."""

    @property
    def metrics(self) -> dict[str, float]:
        """Names and values as the trainer logs them."""
        values = {
            "delta/version": float(self.version),
            "delta/sync_s": self.total_s,
            "delta/prepare_s": self.delivery.prepare_s,
            "delta/pause_s": self.delivery.pause_s,
            "delta/servers": float(self.delivery.num_servers),
            "delta/servers_behind": float(self.delivery.num_behind),
            "delta/server_version": float(self.delivery.oldest_version),
            "delta/staleness": float(self.version - self.delivery.oldest_version),
        }
        if self.published is not None:
            published = self.published
            values |= {
                "delta/changed_fraction": published.num_changed / max(published.num_elements, 1),
                "delta/stored_bytes": float(published.stored_bytes),
                "delta/stored_share": published.stored_bytes / max(published.full_bytes, 1),
                "delta/capture_s": published.step_s + published.capture_s,
                "delta/encode_s": published.encode_s,
                "delta/upload_s": published.upload_s,
                "delta/commit_s": published.commit_s,
                "delta/publish_s": published.total_s,
            }
        return values

    def __str__(self) -> str:
        what = f"delta v{self.version} (step {self.step})"
        if self.published is not None:
            published = self.published
            what += (
                f": {published.num_changed / max(published.num_elements, 1):.2%} changed, "
                f"{published.stored_bytes:,} bytes of {published.full_bytes:,}, publish {published.total_s:.2f} s"
            )
        servers = f"{self.delivery.num_servers} server" + ("s" if self.delivery.num_servers != 1 else "")
        behind = f", {self.delivery.num_behind} behind" if self.delivery.num_behind else ""
        return (
            f"{what}, prepare {self.delivery.prepare_s:.2f} s, pause {self.delivery.pause_s:.3f} s, {servers}{behind}"
        )
