"""Versions of this rank between collecting and their outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.events import PublishReport

if TYPE_CHECKING:
    from torch_delta.capture.source import Collected
    from torch_delta.publish.lineage import Opening
    from torch_delta.publish.pipeline import Timings
    from torch_delta.publish.records import Committed


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A version collected on this rank whose outcome is not known yet."""

    version: int
    collected: Collected | None
    """What the source said, without the changes; None if it raised."""
    timings: Timings
    started: float
    capture_s: float
    back_pressure_s: float

    @property
    def token(self) -> int:
        """Of the change set; a version that was committed was collected on every rank."""
        assert self.collected is not None, "a rank that could not collect says so in its receipt"
        return self.collected.token

    def report(self, outcome: Committed, opening: Opening) -> PublishReport:
        """The report of the version, now that it is committed."""
        assert self.collected is not None
        return PublishReport(
            version=outcome.version,
            num_changed=outcome.num_changed,
            num_elements=opening.num_elements,
            stored_bytes=outcome.stored_bytes,
            full_bytes=opening.full_bytes,
            num_parts=outcome.num_parts,
            num_steps=self.collected.num_steps,
            step_s=self.collected.step_seconds,
            capture_s=self.capture_s,
            back_pressure_s=self.back_pressure_s,
            encode_s=self.timings.encode_s,
            upload_s=self.timings.upload_s,
            receipts_s=outcome.receipts_s,
            commit_s=outcome.commit_s,
            total_s=time.perf_counter() - self.started,
            info=self.collected.info,
        )


class Versions:
    """Numbers versions, and keeps those whose outcome is open.

    Args:
        committed: the version the stream stands at.
    """

    def __init__(self, committed: int) -> None:
        self.committed = committed
        """The last version known to exist."""
        self.newest = committed
        """The last number given out."""
        self.unsettled: dict[int, InFlight] = {}
        """Versions whose commit may or may not exist; the coordinator settles them before anything else."""
        self._in_flight: dict[int, InFlight] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def next(self) -> int:
        """Number a new version."""
        self.newest += 1
        return self.newest

    def add(self, entry: InFlight) -> None:
        """A version was collected."""
        self._in_flight[entry.version] = entry

    def settle(self, version: int) -> InFlight:
        """A version exists."""
        self.committed = version
        return self._in_flight.pop(version, None) or self.unsettled.pop(version)

    def lose(self, next_version: int) -> int | None:
        """Versions from `next_version` on are lost, earlier ones in flight unsettled; numbering resumes there.

        Returns:
            The token to roll back to, or None if nothing was collected for the lost ones.
        """
        lost = [entry for version, entry in sorted(self._in_flight.items()) if version >= next_version]
        self.unsettled.update({v: entry for v, entry in self._in_flight.items() if v < next_version})
        self._in_flight.clear()
        self.newest = next_version - 1
        return next((entry.collected.token for entry in lost if entry.collected is not None), None)
