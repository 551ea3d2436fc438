"""The trainer's hand on many servers: prepare a version everywhere, then pause, apply and resume each.

    with Fleet(["http://a:8000", "http://b:8000"], token=..., stream="s3://bucket/run-7") as fleet:
        ...
        report = publisher.wait(version)
        fleet.update(version)              # requests in flight go on; report per server, failures by URL

Every server goes through its version on its own thread; between preparing and applying they wait for each other, so
that the fleet changes version in one go. Servers that are left out or join are rolled forward beside that, so that one
which needs an hour of catching up delays nobody.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

from torch_delta.errors import FleetFailed
from torch_delta.vllm.fleet.config import FleetConfig
from torch_delta.vllm.fleet.counting import Counting
from torch_delta.vllm.fleet.http import Http
from torch_delta.vllm.fleet.lineage import tell_apart
from torch_delta.vllm.fleet.reports import FleetReport, FleetStatus
from torch_delta.vllm.fleet.roster import Roster
from torch_delta.vllm.fleet.server import Server, phase_of
from torch_delta.vllm.fleet.wire import Goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from torch_delta.vllm.fleet.reports import FleetMetrics, PrepareReport, ServerReport, ServerStatus

T = TypeVar("T")


class Fleet:
    """Servers that follow one stream, controlled from one process. Thread-safe; updates run one after the other.

    Args:
        urls: of the servers, ``http://host:port``; more may be added later.
        token: for the Authorization header of every request; None sends none.
        stream: URL of the stream; None if the servers know theirs (TORCH_DELTA_STREAM).
        init_info: further fields for every server's initialisation: checkpoint, base, mode, timeout_s, auto_follow.
        config: deadlines, routes and what to do about failing servers.

    Raises:
        ValueError: a URL, the token or an option that cannot work.
    """

    def __init__(
        self,
        urls: Iterable[str] = (),
        *,
        token: str | None = None,
        stream: str | None = None,
        init_info: Mapping[str, object] | None = None,
        config: FleetConfig | None = None,
    ) -> None:
        self.config = config if config is not None else FleetConfig()
        self._token = token
        self._init_info: dict[str, object] = dict(init_info) if init_info is not None else {}
        if stream is not None:
            if self._init_info.get("stream", stream) != stream:
                raise ValueError(f"stream={stream!r} and init_info name different streams")
            self._init_info["stream"] = stream
        self._updating = threading.Lock()
        self._counting = Counting()
        self._roster = Roster(self._go_to, self._counting)
        for url in urls:
            self._new_server(url)

    def init(self) -> Mapping[str, str]:
        """Tell every server its stream, unless its present processes know it. `prepare` and `update` do this too.

        Returns:
            Generations by URL: identities of the servers' processes.

        Raises:
            FleetFailed: a server failed and the policy is ``raise``, or all failed.
        """
        with self._updating:
            told, failures = self._everywhere(self._roster.members(), lambda server: server.init()[0])
            self._settle_failures("init", told, failures)
            return MappingProxyType(told)

    def prepare(self, version: int, *, stream_id: str | None = None) -> Mapping[str, PrepareReport]:
        """Have every member fetch and verify a version, while they generate; returns when all have.

        Args:
            version: to prepare.
            stream_id: see `update`.

        Raises:
            FleetFailed: a server failed and the policy is ``raise``, or all failed.
        """
        with self._updating:
            return MappingProxyType(self._prepare(_checked(version, stream_id)))

    def update(self, version: int, *, stream_id: str | None = None) -> FleetReport:
        """Prepare a version everywhere, then apply it everywhere. A server that is there already is left alone.

        Args:
            version: at least the servers' present one, unless a restarted trainer continued the stream in another.
            stream_id: of the stream that the version is of. None leaves it to the servers, which look every time
                whether theirs is continued; all of them must find the same.

        Returns:
            Reports and failures by server.

        Raises:
            FleetFailed: a server failed and the policy is ``raise``, or all failed. `.failures` and `.reports` tell
                which; no server was left paused unless its failure says that resuming failed.
        """
        with self._updating:
            began_s = time.monotonic()
            self._counting.asked()
            prepared = self._prepare(_checked(version, stream_id))
            ready_s = time.monotonic()
            excluded = self._roster.excluded()

            def apply(server: Server) -> ServerReport:
                report = prepared[server.url]
                barrier_s = ready_s - began_s - report.init_s - report.prepare_s
                return self._apply(server, report, max(0.0, barrier_s))

            members = [server for server in self._roster.members() if server.url in prepared]
            reports, failures = self._everywhere(members, apply)
            self._settle_failures(f"update to version {version}", reports, failures)
            return FleetReport(
                version=version,
                reports=MappingProxyType(reports),
                failures=MappingProxyType({**excluded, **failures}),
                total_s=time.monotonic() - began_s,
            )

    def add(self, url: str, *, wait_s: float | None = None) -> None:
        """Let a server join: it is rolled forward to the fleet's version in the background, then takes part in updates.

        Args:
            url: of the server; one that is known already is rolled forward again if it was excluded.
            wait_s: return when it has caught up, at most after this long; None does not wait.

        Raises:
            DeadlineExceeded: not caught up in `wait_s`.
            FleetFailed: it failed to catch up within `wait_s`; it stays excluded until a later update rolls it forward.
        """
        server = self._new_server(url)
        self._roster.join(server)
        if wait_s is not None:
            self.wait_caught_up(wait_s, urls=[server.url])

    def remove(self, url: str) -> None:
        """Forget a server: it is not spoken to any more. An operation in progress with it runs to its end."""
        self._roster.forget(url.rstrip("/"))

    def wait_caught_up(self, timeout_s: float, *, urls: Iterable[str] | None = None) -> None:
        """Wait until the servers that are being rolled forward have arrived.

        Args:
            timeout_s: at most this long.
            urls: wait for these; None for all.

        Raises:
            DeadlineExceeded: some have not.
            FleetFailed: some failed; they stay excluded until a later update rolls them forward.
        """
        failures = self._roster.wait(timeout_s, None if urls is None else [url.rstrip("/") for url in urls])
        if failures:
            raise self._failed("catch up", {}, failures)

    def ready(self, version: int, *, stream_id: str | None = None) -> Mapping[str, bool]:
        """Which servers may be given requests for at least `version`, by URL; one that does not answer may not.

        Args:
            version: of the stream of the last update, unless `stream_id` names another.
            stream_id: of the stream that the version is of.
        """
        target = self._roster.target
        if stream_id is None and target is not None:
            stream_id = target.stream_id
        status = self.status()
        return MappingProxyType(
            {
                server.url: (seen := status.servers.get(server.url)) is not None
                and seen.ready
                and seen.version is not None
                and seen.version >= version
                and stream_id in {None, seen.stream_id}
                for server in self._roster.all()
            }
        )

    def status(self) -> FleetStatus:
        """Ask all servers, members or not."""

        def look(server: Server) -> ServerStatus:
            return server.look()

        servers, failures = self._everywhere(self._roster.all(), look)
        target = self._roster.target
        return FleetStatus(
            target=None if target is None else target.version,
            stream_id=None if target is None else target.stream_id,
            servers=MappingProxyType(servers),
            failures=MappingProxyType(failures),
            excluded=MappingProxyType(self._roster.excluded()),
        )

    def verify(self) -> None:
        """Start a digest of all live weights on every member, in the background; the result is in `status()`.

        Raises:
            FleetFailed: a server did not accept it.
        """
        started, failures = self._everywhere(self._roster.members(), lambda server: server.verify())
        if failures:
            raise self._failed("verify", started, failures)

    def metrics(self) -> FleetMetrics:
        """Counters since the fleet was made."""
        return self._counting.metrics(self._roster.all())

    def close(self) -> None:
        """End waits for servers that prepare, and wait for pauses in progress to end. Servers go on as they are."""
        self._roster.stop.set()
        self._roster.wait(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, goal: Goal) -> dict[str, PrepareReport]:
        """All members prepare; what failed is settled by the policy. Others are rolled forward meanwhile."""
        self._roster.aim(goal)
        self._roster.roll_forward()
        prepared, failures = self._everywhere(
            self._roster.members(), lambda server: server.prepare(goal, self._roster.stop)
        )
        target = self._roster.target
        newest, astray = tell_apart(prepared, known=None if target is None else target.stream_id)
        if newest is not None:
            self._roster.learn(Goal(goal.version, newest))
        failures |= astray
        prepared = {url: report for url, report in prepared.items() if url not in failures}
        self._settle_failures(f"prepare version {goal.version}", prepared, failures)
        return prepared

    def _settle_failures(self, what: str, reports: Mapping[str, object], failures: Mapping[str, Exception]) -> None:
        """Count failures, then exclude their servers or raise, as the policy says."""
        for error in failures.values():
            self._counting.failed(phase_of(error))
        if self.config.on_failure == "exclude":
            for server in self._roster.members():
                if server.url in failures:
                    self._roster.exclude(server, failures[server.url])
        if failures and (self.config.on_failure == "raise" or not reports):
            raise self._failed(what, reports, failures)
        if not reports:
            raise ValueError(f"{what}: the fleet has no server; add(url) first")

    def _go_to(self, server: Server, goal: Goal | None) -> None:
        """One server alone, as far as the fleet is."""
        if goal is None:
            server.init()
        else:
            self._apply(server, server.prepare(goal, self._roster.stop), 0.0)

    def _apply(self, server: Server, prepared: PrepareReport, barrier_s: float) -> ServerReport:
        report = server.apply(prepared, barrier_s)
        self._counting.applied(report)
        return report

    def _everywhere(
        self, servers: Sequence[Server], action: Callable[[Server], T]
    ) -> tuple[dict[str, T], dict[str, Exception]]:
        """Run an action for all servers at once and wait for all; results and failures by URL."""
        results: dict[str, T] = {}
        failures: dict[str, Exception] = {}
        if not servers:
            return results, failures
        with ThreadPoolExecutor(max_workers=len(servers), thread_name_prefix="torch_delta-fleet") as pool:
            futures = {server.url: pool.submit(action, server) for server in servers}
            for url, future in futures.items():
                try:
                    results[url] = future.result()
                except Exception as error:  # one server's failure must not hide the others' results
                    failures[url] = error
        return results, failures

    def _failed(self, what: str, reports: Mapping[str, object], failures: Mapping[str, Exception]) -> FleetFailed:
        lines = "; ".join(f"{url}: {error}" for url, error in sorted(failures.items()))
        error = FleetFailed(
            f"{what}: {len(failures)} of {len(failures) + len(reports)} servers failed: {lines}",
            failures=dict(failures),
            reports=dict(reports),
        )
        error.__cause__ = next(iter(failures.values()))
        return error

    def _new_server(self, url: str) -> Server:
        return self._roster.take_in(Server(Http(url, self._token), self._init_info, self.config))


def _checked(version: int, stream_id: str | None) -> Goal:
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"expected a version number of the stream, 0 or more, got {version!r}")
    if stream_id is not None and (not isinstance(stream_id, str) or not stream_id):
        raise ValueError(f"expected the id of a stream, or None, got {stream_id!r}")
    return Goal(version, stream_id)
