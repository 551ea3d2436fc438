"""Who is in a fleet, in which role, and the threads that roll servers forward which take no part.

A server that fails is excluded; one that joins is rolled forward like one that comes back. Each does that on a thread
of its own, so that one which needs an hour of catching up delays nobody.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from torch_delta.errors import DeadlineExceeded
from torch_delta.vllm.fleet.server import phase_of
from torch_delta.vllm.fleet.wire import Goal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch_delta.vllm.fleet.counting import Counting
    from torch_delta.vllm.fleet.server import Server


class Roster:
    """See the module. Thread-safe.

    Args:
        go_to: takes a server to a version, or only initialises it if that is None; raises if it fails.
        counting: told of exclusions and returns.
    """

    def __init__(self, go_to: Callable[[Server, Goal | None], None], counting: Counting) -> None:
        self.stop = threading.Event()
        """Set when the fleet closes."""
        self._go_to = go_to
        self._counting = counting
        self._lock = threading.Lock()  # of all that follows, and of the servers' roles and failures
        self._servers: dict[str, Server] = {}
        self._running: dict[str, Future[None]] = {}
        self._target: Goal | None = None

    @property
    def target(self) -> Goal | None:
        """Version of the last update asked for; what servers that catch up go to."""
        return self._target

    def aim(self, goal: Goal) -> None:
        """A version was asked for."""
        with self._lock:
            before = self._target
            if before is None or goal.stream_id not in {None, before.stream_id}:
                self._target = goal  # in another stream numbers begin anew
            else:
                self._target = Goal(max(before.version, goal.version), before.stream_id)

    def learn(self, goal: Goal) -> None:
        """It turned out which stream the version that was asked for is of."""
        with self._lock:
            before = self._target
            if before is not None and before.stream_id is None:
                self._target = Goal(max(before.version, goal.version), goal.stream_id)
            elif before is None or goal.stream_id != before.stream_id:
                self._target = goal

    def take_in(self, server: Server) -> Server:
        """Know a server from now on; returns the one that is known under its URL already, if there is one."""
        with self._lock:
            return self._servers.setdefault(server.url, server)

    def forget(self, url: str) -> None:
        """Know it no more.

        Raises:
            ValueError: it was not known.
        """
        with self._lock:
            if self._servers.pop(url, None) is None:
                raise ValueError(f"no server {url} in this fleet; servers: {sorted(self._servers)}")

    def all(self) -> list[Server]:
        """All servers."""
        with self._lock:
            return list(self._servers.values())

    def members(self) -> list[Server]:
        """Those that take part in updates."""
        return [server for server in self.all() if server.role == "member"]

    def excluded(self) -> dict[str, Exception]:
        """What went wrong with those that take no part, by URL."""
        with self._lock:
            servers = list(self._servers.values())
            return {s.url: s.failure for s in servers if s.role == "excluded" and s.failure is not None}

    def exclude(self, server: Server, error: Exception) -> None:
        """Leave a server out until it has caught up."""
        with self._lock:
            server.role, server.failure = "excluded", error
        self._counting.excluded()

    def join(self, server: Server) -> None:
        """Have a server catch up before it takes part."""
        with self._lock:
            if server.role == "member":
                server.role = "joining"
        self._roll_forward(server)

    def roll_forward(self) -> None:
        """Have every server that takes no part catch up.

        If nobody takes part, nobody would be delayed: then those that were excluded take part at once instead.
        """
        if not self.members():
            self._readmit()
        for server in self.all():
            if server.role != "member":
                self._roll_forward(server)

    def wait(self, timeout_s: float | None, urls: Iterable[str] | None = None) -> Mapping[str, Exception]:
        """Wait for servers that catch up.

        Args:
            timeout_s: at most this long; None waits until they have arrived or failed.
            urls: of the servers; None for all that are at it.

        Returns:
            What went wrong, by URL.

        Raises:
            DeadlineExceeded: some have neither arrived nor failed.
        """
        with self._lock:
            wanted = set(urls) if urls is not None else set(self._running)
            running = {url: future for url, future in self._running.items() if url in wanted}
        _, late = wait(running.values(), timeout=timeout_s)
        behind = sorted(url for url, future in running.items() if future in late)
        if behind:
            version = None if self._target is None else self._target.version
            raise DeadlineExceeded(
                f"catch up: servers {behind} are not at version {version} after {timeout_s} s; they go on",
                phase="catch up",
                peer=", ".join(behind),
                timeout_s=timeout_s,
            )
        return {url: failure for url, failure in self.excluded().items() if url in wanted}

    def _readmit(self) -> None:
        self.wait(None)
        with self._lock:
            for server in self._servers.values():
                if server.role == "excluded":
                    server.role, server.failure = "member", None
                    self._counting.joined()

    def _roll_forward(self, server: Server) -> None:
        """Start a thread for the server, unless one is at it."""
        with self._lock:
            running = self._running.get(server.url)
            if self.stop.is_set() or (running is not None and not running.done()):
                return
            future: Future[None] = Future()
            self._running[server.url] = future

        def catch_up() -> None:
            try:
                self._catch_up(server)
            except Exception as error:  # the server's failure, told by `excluded`
                self._counting.failed(phase_of(error))
                self.exclude(server, error)
            finally:
                future.set_result(None)

        threading.Thread(target=catch_up, name=f"torch_delta-catch-up-{server.url}", daemon=True).start()

    def _catch_up(self, server: Server) -> None:
        while True:
            target = self._target
            self._go_to(server, target)
            with self._lock:
                if target == self._target:  # else a newer version was asked for meanwhile
                    server.role, server.failure = "member", None
                    break
        self._counting.joined()
