"""One server of a fleet: what it was last told, whether it is another process now, and its way through a version."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_delta.errors import ServerRefused, TorchDeltaError
from torch_delta.store.waiting import Backoff, poll
from torch_delta.vllm.fleet.answers import failure_of, prepared_of, version_of
from torch_delta.vllm.fleet.dev_wire import DevWire
from torch_delta.vllm.fleet.http import Deadline
from torch_delta.vllm.fleet.plugin_wire import PluginWire
from torch_delta.vllm.fleet.reports import PrepareReport, Role, ServerReport, ServerStatus
from torch_delta.vllm.fleet.wire import Wire, worker_refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta.vllm.fleet.http import Http
    from torch_delta.vllm.fleet.reports import WorkerStatus
    from torch_delta.vllm.fleet.wire import Answered

logger = logging.getLogger("torch_delta")


class Server:
    """See the module. Steps of one server run one at a time; `look` may run beside them.

    Args:
        http: to the server.
        init_info: what it is to be initialised with.
        config: deadlines and routes.
    """

    def __init__(self, http: Http, init_info: Mapping[str, object], config: FleetConfig) -> None:
        self.http = http
        self.url = http.url
        self.role: Role = "member"
        self.failure: Exception | None = None
        """Why it is excluded."""
        self.num_restarts = 0
        self._init_info = dict(init_info)
        self._config = config
        self._wire: Wire | None = None
        self._told: str | None = None  # the generation that was initialised with `init_info`
        self._steps = threading.Lock()

    def look(self) -> ServerStatus:
        """The server's own word on itself.

        Raises:
            TorchDeltaError: there is none.
        """
        deadline = Deadline(self._config.status_timeout_s)
        return self._seen(self._find_wire(deadline).status(deadline))

    def init(self) -> tuple[str, bool]:
        """Make sure that the server's present processes know their stream.

        Returns:
            Their generation, and whether they are others than the last time.

        Raises:
            TorchDeltaError: not reachable, or refused.
        """
        with self._steps:
            return self._init()

    def prepare(self, version: int, stop: threading.Event) -> PrepareReport:
        """Have `version` fetched and verified; the server generates meanwhile.

        Args:
            version: to prepare.
            stop: ends the waiting from another thread.

        Raises:
            TorchDeltaError: names the server and the phase.
        """
        with self._steps:
            return self._prepare(version, stop)

    def apply(self, prepared: PrepareReport, barrier_s: float) -> ServerReport:
        """Pause, apply what was prepared, resume.

        Args:
            prepared: of the version to apply.
            barrier_s: seconds the server waited since, for the report.

        Raises:
            TorchDeltaError: names the server and the phase; the server was resumed, or the error says that this failed.
        """
        with self._steps:
            return self._apply(prepared, barrier_s)

    def verify(self) -> None:
        """Start a digest of all of the server's live weights, in its background."""
        deadline = Deadline(self._config.status_timeout_s)
        self._find_wire(deadline).verify(deadline)

    def _init(self) -> tuple[str, bool]:
        deadline = Deadline(self._config.status_timeout_s)
        wire = self._find_wire(deadline)
        try:
            answered = wire.status(deadline)
        except ServerRefused as error:
            if getattr(error, "status", None) == 404:
                self._wire = None  # started with other routes, perhaps; the next attempt looks again
            raise
        restarted = self._told is not None and answered.generation != self._told
        if restarted:
            logger.warning("server %s runs in new processes; initialising them", self.url)
            self.num_restarts += 1
            self._wire = None  # nothing of an earlier apply is left, and the routes may be others
            wire = self._find_wire(deadline)
            answered = wire.status(deadline)
        if self._told != answered.generation or any(self._needs_init(worker) for worker in answered.workers):
            wire.init(self._init_info, deadline)
            self._told = answered.generation
        wire.release(resume_timeout_s=self._config.resume_timeout_s)
        return answered.generation, restarted

    def _needs_init(self, worker: WorkerStatus) -> bool:
        """It was never told, or told otherwise by somebody else, or could not do what it was told."""
        strays = worker.stream != self._init_info.get("stream", worker.stream)
        return not worker.initialised or strays or worker.state == "failed"

    def _prepare(self, version: int, stop: threading.Event) -> PrepareReport:
        began_s = time.monotonic()
        generation, restarted = self._init()
        init_s = time.monotonic() - began_s
        wire = self._find_wire(Deadline(self._config.status_timeout_s))
        began_s = time.monotonic()
        wire.prepare(version, self._config.prepare_timeout_s, Deadline(self._config.status_timeout_s))

        def prepared() -> int | None:
            return self._prepared(version, generation, wire)

        now = poll(
            prepared,
            phase=f"prepare version {version}",
            peer=self.url,
            timeout_s=self._config.prepare_timeout_s,
            stop=stop,
            backoff=Backoff(first_s=min(0.02, self._config.poll_s), most_s=self._config.poll_s),
            transient=(),
        )
        if now is None:
            raise ServerRefused(
                f"prepare: the fleet was closed while server {self.url} prepared version {version}",
                url=self.url,
                phase="prepare",
                status=None,
            )
        return PrepareReport(
            url=self.url,
            version=version,
            prepared=now,
            generation=generation,
            restarted=restarted,
            init_s=init_s,
            prepare_s=time.monotonic() - began_s,
        )

    def _prepared(self, version: int, generation: str, wire: Wire) -> int | None:
        """The version the server can apply, if that is enough; None if it still works on it."""
        answered = wire.status(Deadline(self._config.status_timeout_s))
        if answered.generation != generation:
            raise ServerRefused(
                f"prepare: server {self.url} was restarted while it prepared version {version}; update again",
                url=self.url,
                phase="prepare",
                status=None,
            )
        now = prepared_of(answered.workers)
        if now is not None and now >= version:
            return now
        failed = failure_of([worker for worker in answered.workers if worker.preparing is None])
        if failed is not None:
            raise worker_refused(self.url, "prepare", *failed)
        return None

    def _apply(self, prepared: PrepareReport, barrier_s: float) -> ServerReport:
        deadline = Deadline(self._config.status_timeout_s)
        wire = self._find_wire(deadline)
        before = wire.status(deadline)
        report = ServerReport(
            url=self.url,
            version=prepared.version,
            from_version=version_of(before.workers),
            generation=prepared.generation,
            restarted=prepared.restarted,
            init_s=prepared.init_s,
            prepare_s=prepared.prepare_s,
            barrier_s=barrier_s,
            pause_s=0.0,
        )
        if report.from_version is not None and report.from_version >= prepared.version and not before.owes_reset:
            return replace(report, version=report.from_version)
        try:
            applied = wire.apply(
                prepared.version,
                self._config.mode,
                timeout_s=self._config.apply_timeout_s,
                resume_timeout_s=self._config.resume_timeout_s,
            )
        except ServerRefused as error:
            now = self._overtaken(error, prepared.version, wire)
            if now is None:
                raise
            return replace(report, version=now)
        return replace(report, version=applied.version, pause_s=applied.pause_s, phases_s=applied.phases_s)

    def _overtaken(self, error: ServerRefused, version: int, wire: Wire) -> int | None:
        """The version the server runs, if it refused `version` because it went past it by itself in the meantime."""
        if getattr(error, "status", None) != 409:
            return None
        answered = wire.status(Deadline(self._config.status_timeout_s))
        now = version_of(answered.workers)
        return now if now is not None and now > version and not answered.owes_reset else None

    def _seen(self, answered: Answered) -> ServerStatus:
        workers = answered.workers
        return ServerStatus(
            url=self.url,
            role=self.role,
            generation=answered.generation,
            version=version_of(workers),
            prepared=prepared_of(workers),
            ready=all(worker.ready for worker in workers) and not answered.owes_reset and not answered.paused,
            workers=workers,
        )

    def _find_wire(self, deadline: Deadline) -> Wire:
        """The routes this server has; asked once."""
        wire = self._wire
        if wire is None:
            choice = self._config.routes
            if choice == "auto":
                answer = self.http.ask("GET", "/torch_delta/status", phase="connect", deadline=deadline)
                has_ours = answer.ok and isinstance(answer.body, dict) and "workers" in answer.body
                if not has_ours and answer.status != 404:
                    raise self.http.refused(answer, "connect", "GET /torch_delta/status")
                choice = "plugin" if has_ours else "dev"
            wire = self._wire = PluginWire(self.http) if choice == "plugin" else DevWire(self.http)
        return wire


def phase_of(error: Exception) -> str:
    """Where a server failed, for counting."""
    phase = getattr(error, "phase", "other") if isinstance(error, TorchDeltaError) else "other"
    return str(phase).split(" ")[0]
