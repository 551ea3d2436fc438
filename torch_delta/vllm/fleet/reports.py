"""What a fleet says about its servers: one report per server and version, statuses, and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["member", "joining", "excluded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """A server holds a version, verified and ready to apply."""

    url: str
    version: int
    """That was asked for."""
    prepared: int
    """Highest version it can apply now, at least `version`."""
    stream_id: str | None
    """Of the stream that these versions are of; None if the server does not say."""
    generation: str
    """Identity of the server's processes; another one after a restart."""
    restarted: bool
    """The processes are not the ones the fleet last spoke to."""
    init_s: float
    """Seconds of the status call and, where the server needed it, of initialising it."""
    prepare_s: float
    """Seconds until every worker reported the version as prepared; the server generates meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerReport:
    """A server runs a version, which all of its workers verified."""

    url: str
    version: int
    """It runs; newer than the one asked for if it had to reload and its checkpoint had moved on."""
    stream_id: str | None
    """Of the stream that `version` is of; None if the server does not say."""
    from_version: int | None
    """What it ran before; None if it did not know. Of the same stream, unless that was continued meanwhile."""
    generation: str
    """Identity of the server's processes."""
    restarted: bool
    """The processes are not the ones the fleet last spoke to."""
    init_s: float
    """See `PrepareReport`."""
    prepare_s: float
    """See `PrepareReport`."""
    barrier_s: float
    """Seconds it waited, generating, for the other servers to prepare."""
    pause_s: float
    """Seconds from asking for the pause to its end; 0 if there was nothing to apply. As seen by the server's own
    process where the plugin's routes are there, else by this client, the way there and back included."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the pause: pause, start, update, check, finish, reset, resume."""

    @property
    def applied(self) -> bool:
        """Whether weights were written; False if the server was there already."""
        return self.pause_s > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetReport:
    """One version, over all servers."""

    version: int
    reports: Mapping[str, ServerReport]
    """Servers that run it, by URL."""
    failures: Mapping[str, Exception]
    """Servers that do not, by URL: excluded until they are rolled forward."""
    total_s: float
    """Seconds of the whole update."""

    @property
    def pause_s(self) -> float:
        """Longest pause of any server, seconds."""
        return max((report.pause_s for report in self.reports.values()), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """What one worker (one rank of one server) says."""

    rank: int
    generation: str
    """Identity of the process; empty if it names none."""
    initialised: bool
    """It knows its stream."""
    stream: str | None
    """URL of that stream."""
    stream_id: str | None
    """Of the stream that versions are of: that one, or the newest that continues it. None before it is known."""
    state: str | None
    """Where it stands: new, attaching, failed, serving, dirty or lost."""
    version: int | None
    """That it runs and verified; None before it is known."""
    prepared: int | None
    """Highest version it can apply without fetching; None if there is none."""
    answered: int
    """Number of the newest request to prepare that it has dealt with, well or not."""
    preparing: Mapping[str, object] | None
    """What it is fetching and decoding now: target, phase and seconds so far."""
    error: Mapping[str, object] | None
    """Last failure: type, message, phase and facts."""
    dirty: str | None
    """Why its weights are in doubt; None if they are not."""
    ready: bool
    """It may serve."""
    session: bool
    """An update session is open."""
    raw: Mapping[str, object]
    """Everything it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStatus:
    """What one server says, over all of its workers."""

    url: str
    role: Role
    """`member`: takes part in updates; `joining` or `excluded`: not until it has caught up."""
    generation: str
    """Identity of its processes together."""
    stream_id: str | None
    """Of the stream that versions are of; None if the workers differ or do not know."""
    version: int | None
    """All workers run and verified it; None if they differ or do not know."""
    prepared: int | None
    """All workers can apply it; None if one cannot apply anything."""
    ready: bool
    """It may be given requests: every worker is, and no reset of its caches is owed."""
    workers: tuple[WorkerStatus, ...]
    """In the order of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetStatus:
    """All servers at one moment."""

    target: int | None
    """Version of the last update asked for."""
    stream_id: str | None
    """Of the stream that `target` is of, as far as the fleet knows."""
    servers: Mapping[str, ServerStatus]
    """Servers that answered, by URL."""
    failures: Mapping[str, Exception]
    """Servers that did not, by URL."""
    excluded: Mapping[str, Exception]
    """Servers that take no part, and what went wrong with each, by URL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMetrics:
    """Counters since the fleet was made; for a metrics system to read."""

    num_servers: int
    """Known now."""
    num_excluded: int
    """Taking no part now."""
    num_updates: int
    """Versions asked for."""
    num_applied: int
    """Versions applied, summed over servers."""
    num_failures: Mapping[str, int]
    """Failures of servers, by phase."""
    num_exclusions: int
    """Times a server was left out."""
    num_rejoins: int
    """Times one came back or joined."""
    num_restarts: int
    """Times one was found with new processes."""
    pause_s: float
    """Sum of all pauses of all servers, seconds."""
    longest_pause_s: float
    """Longest of them, seconds."""
