"""One server of a fleet: what it was last told, whether it is another process now, and its way through a version."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_delta.errors import ServerRefused, TorchDeltaError
from torch_delta.store.waiting import Backoff, poll
from torch_delta.vllm.fleet.answers import prepare_failure_of, prepared_of, stream_id_of, version_of
from torch_delta.vllm.fleet.dev_wire import DevWire
from torch_delta.vllm.fleet.http import Deadline
from torch_delta.vllm.fleet.plugin_wire import PluginWire
from torch_delta.vllm.fleet.reports import PrepareReport, Role, ServerReport, ServerStatus
from torch_delta.vllm.fleet.wire import Goal, Wire, worker_refused

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

    def prepare(self, goal: Goal, stop: threading.Event) -> PrepareReport:
        """Have a version fetched and verified; the server generates meanwhile.

        Args:
            goal: to prepare.
            stop: ends the waiting from another thread.

        Raises:
            TorchDeltaError: names the server and the phase.
        """
        with self._steps:
            return self._prepare(goal, stop)

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

    def _prepare(self, goal: Goal, stop: threading.Event) -> PrepareReport:
        version = goal.version
        began_s = time.monotonic()
        generation, restarted = self._init()
        init_s = time.monotonic() - began_s
        wire = self._find_wire(Deadline(self._config.status_timeout_s))
        began_s = time.monotonic()
        number = wire.prepare(goal, self._config.prepare_timeout_s, Deadline(self._config.status_timeout_s))

        def prepared() -> Goal | None:
            return self._prepared(goal, number, generation, wire)

        found = poll(
            prepared,
            phase=f"prepare version {version}",
            peer=self.url,
            timeout_s=self._config.prepare_timeout_s,
            stop=stop,
            backoff=Backoff(first_s=min(0.02, self._config.poll_s), most_s=self._config.poll_s),
            transient=(),
        )
        if found is None:
            raise ServerRefused(
                f"prepare: the fleet was closed while server {self.url} prepared version {version}",
                url=self.url,
                phase="prepare",
                status=None,
            )
        return PrepareReport(
            url=self.url,
            version=version,
            prepared=found.version,
            stream_id=found.stream_id,
            generation=generation,
            restarted=restarted,
            init_s=init_s,
            prepare_s=time.monotonic() - began_s,
        )

    def _prepared(self, goal: Goal, number: int, generation: str, wire: Wire) -> Goal | None:
        """The version the server can apply, if that is enough; None if it still works on it.

        A number alone is not: a server may run it, or a greater one, of a stream that goes on elsewhere with smaller
        ones. So either the stream is known, or the server has looked, which it does with every request.
        """
        answered = wire.status(Deadline(self._config.status_timeout_s))
        if answered.generation != generation:
            raise ServerRefused(
                f"prepare: server {self.url} was restarted while it prepared version {goal.version}; update again",
                url=self.url,
                phase="prepare",
                status=None,
            )
        now, follows = prepared_of(answered.workers), stream_id_of(answered.workers)
        if goal.stream_id is None:
            is_right = all(worker.answered >= number for worker in answered.workers)
        else:
            is_right = follows == goal.stream_id
        if now is not None and now >= goal.version and is_right:
            return Goal(now, follows)
        failed = prepare_failure_of(answered.workers, number)
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
            stream_id=prepared.stream_id,
            from_version=version_of(before.workers),
            generation=prepared.generation,
            restarted=prepared.restarted,
            init_s=prepared.init_s,
            prepare_s=prepared.prepare_s,
            barrier_s=barrier_s,
            pause_s=0.0,
        )
        goal = Goal(prepared.version, prepared.stream_id)
        # Who asks for a reload wants the weights loaded anew, whatever a server that follows by itself runs by now.
        if self._config.mode == "auto" and self._is_there(goal, before):
            assert report.from_version is not None
            return replace(report, version=report.from_version)
        try:
            applied = wire.apply(
                goal,
                self._config.mode,
                timeout_s=self._config.apply_timeout_s,
                resume_timeout_s=self._config.resume_timeout_s,
            )
        except ServerRefused as error:
            answered = self._overtaken(error, wire)
            if answered is None or not self._is_there(goal, answered):
                raise
            now = version_of(answered.workers)
            assert now is not None
            return replace(report, version=now)
        return replace(report, version=applied.version, pause_s=applied.pause_s, phases_s=applied.phases_s)

    def _overtaken(self, error: ServerRefused, wire: Wire) -> Answered | None:
        """The server's status, if it may have refused a version because it went past it by itself in the meantime."""
        if getattr(error, "status", None) != 409:
            return None
        return wire.status(Deadline(self._config.status_timeout_s))

    def _is_there(self, goal: Goal, answered: Answered) -> bool:
        """Whether all workers run that version or a later one of the same stream, and nothing older is cached."""
        now = version_of(answered.workers)
        is_same = stream_id_of(answered.workers) == goal.stream_id
        return now is not None and now >= goal.version and is_same and not answered.owes_reset

    def _seen(self, answered: Answered) -> ServerStatus:
        workers = answered.workers
        return ServerStatus(
            url=self.url,
            role=self.role,
            generation=answered.generation,
            stream_id=stream_id_of(workers),
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
