"""Where one rank of an engine stands: the facts its threads share, and the status they add up to.

    new ──► attaching ──► serving ◄──────────────┐
                │            │ apply not undone   │ reload
                ▼            ▼                    │
              failed       dirty ─────────────────┤
                           lost (sleep level 2) ──┘

`version` is set only to what was proved. While it is None the weights are of no version that could be named, `ready` is
false, and the next update reloads everything from the working copy.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from torch_delta.errors import TorchDeltaError
from torch_delta.vllm.records import Failure, Identity, Phase, Prepared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.vllm.attaching import Attached
    from torch_delta.vllm.config import Settings
    from torch_delta.vllm.host import Host
    from torch_delta.vllm.records import LiveLike

_MOST_PREPARED = 4  # plans for different targets: a driver that follows and a caller that asks need not be in step

logger = logging.getLogger("torch_delta")


class Standing:
    """The shared facts. Fields are read and changed under `lock`, which nobody holds while waiting for anything.

    Attributes:
        lock: guards every field.
        identity: who this rank is.
        settings: what the init request decided; None before.
        host: the working copy; None until attached.
        live: the routed model; None until attached, and for an engine that only reloads.
        proved: the routes were compared with known bits once.
        version: of the live weights; None while nobody knows.
        digests: of the live weights, by schema index, at `version`.
        dirty: why the weights are of no version; empty when they are.
        lost: why the weights are gone; empty when they are not.
        needs_reload: why only a reload leads on, though the weights are whole; empty when they need none.
        asleep: why the memory of the weights must not be touched now; empty when it may.
        stale_cache: why cached results of older weights may still be served; empty when none can be.
        prepared: by version, what can be applied now.
        epoch: counts init requests that started over; work of an older epoch is dropped.
        num_applies: counts updates that were begun; what was read from live weights across one is not to be trusted.
        num_asked: counts requests to prepare; an older one stops waiting for a version that is not published.
        num_answered: number of the newest of them that was dealt with, well or not.
        session: an update session is open.
        failed_update: the open session's update failed.
        outcome: how the last init, start, update or finish went; None for well.
    """

    def __init__(self, identity: Identity) -> None:
        self.lock = threading.RLock()
        self.identity = identity
        self.settings: Settings | None = None
        self.host: Host | None = None
        self.live: LiveLike | None = None
        self.proved = False
        self.version: int | None = None
        self.digests: Mapping[int, Digest] = {}
        self.dirty = ""
        self.lost = ""
        self.needs_reload = ""
        self.asleep = ""
        self.stale_cache = ""
        self.prepared: dict[int, Prepared] = {}
        self.epoch = 0
        self.num_applies = 0
        self.num_asked = self.num_answered = 0
        self.session = False
        self.failed_update = False
        self.outcome: Failure | None = None
        self.reports: dict[str, Any] = {"last_attach": None, "last_prepare": None, "last_apply": None}
        self.verified_full: dict[str, Any] | None = None
        self.verifying = False
        self._error: Failure | None = None
        self._working: tuple[int | None, str, float] | None = None

    # -- what happens to it -----------------------------------------------------------------------------------------

    def begin(self, settings: Settings | None) -> None:
        """Start over with other settings, or with none: nothing is known of the weights until attached again."""
        with self.lock:
            host, self.host = self.host, None
            live, self.live = self.live, None
            self.settings = settings
            self.proved = False
            self.version, self.digests = None, {}
            self.needs_reload = ""
            self.prepared.clear()
            self.epoch += 1
            self._error = None
        if host is not None:
            host.close()
        if live is not None:
            live.close()

    def adopt(self, found: Attached, epoch: int) -> bool:
        """The engine is attached; False if another init request came meanwhile, and `found` is nobody's."""
        with self.lock:
            if epoch != self.epoch:
                return False
            host, live = self.host, self.live
            self.host, self.live, self.proved = found.host, found.live, found.proved
            self.version, self.digests = found.version, found.digests
            self.needs_reload = found.needs_reload
            self.prepared.clear()
            self.verified_full = dict(found.verified) if found.verified is not None else None
            self.reports["last_attach"] = dict(found.report)
        if host is not None:
            host.close()
        if live is not None:
            live.close()
        return True

    def advance(self, version: int, digests: Mapping[int, Digest]) -> None:
        """The live weights are proved to be `version` now."""
        with self.lock:
            self.version, self.digests = version, digests
            self.dirty = self.lost = self.needs_reload = ""
            self.prepared = {
                target: p for target, p in self.prepared.items() if p.start == version and target > version
            }
            host = self.host
        if host is not None:
            try:
                host.consume(version)
            except TorchDeltaError as error:  # costs patches kept too long, and must not undo what is done
                logger.warning("cannot note that version %d is applied: %s", version, error)

    def spoil(self, *, dirty: str = "", lost: str = "", needs_reload: str = "") -> None:
        """The live weights are of no known version from now on, for the reason given."""
        with self.lock:
            self.version, self.digests = None, {}
            self.dirty, self.lost = dirty or self.dirty, lost or self.lost
            self.needs_reload = needs_reload or self.needs_reload
            self.prepared.clear()
            live = self.live
        if live is not None:
            live.forget()

    def offer(self, prepared: Prepared, epoch: int) -> bool:
        """Keep what was prepared, if it still leads from where the weights are."""
        with self.lock:
            if epoch != self.epoch or (prepared.how != "reload" and prepared.start != self.version):
                return False
            self.prepared[prepared.version] = prepared
            while len(self.prepared) > _MOST_PREPARED:
                del self.prepared[min(self.prepared)]
            return True

    def sleep(self) -> None:
        """The memory of the weights goes away for a while; what was planned against it is forgotten."""
        with self.lock:
            self.asleep = "the engine sleeps; wake it up first"
            self.prepared.clear()
            live = self.live
        if live is not None:
            live.forget()

    def untouchable(self) -> bool:
        """Whether a background job must let go of the live weights."""
        return bool(self.asleep)

    @property
    def broken(self) -> str:
        """Why only a reload leads on; empty when an index write may."""
        return self.lost or self.dirty or self.needs_reload

    # -- what is going on -------------------------------------------------------------------------------------------

    def working(self, target: int | None, phase: str) -> None:
        """A background job towards `target` is in `phase`."""
        with self.lock:
            started_s = time.monotonic() if self._working is None else self._working[2]
            self._working = (target, phase, started_s)

    def idle(self, asked: int = 0) -> None:
        """No background job runs; the last one was the request to prepare of this number, or none (0)."""
        with self.lock:
            self._working = None
            self.num_answered = max(self.num_answered, asked)

    def fail(self, phase: Phase, error: BaseException) -> Failure:
        """Remember the newest failure."""
        failure = Failure.of(phase, error)
        with self.lock:
            self._error = failure
        return failure

    def clear(self, *phases: Phase) -> None:
        """Forget the newest failure if it was in one of these phases."""
        with self.lock:
            if self._error is not None and self._error.phase in phases:
                self._error = None

    @property
    def error(self) -> Failure | None:
        """The newest failure that still matters."""
        return self._error

    # -- what it says -----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """One word; see the top of this file."""
        if self.lost:
            return "lost"
        if self.dirty:
            return "dirty"
        if self.host is not None:
            return "serving"
        if self._working is not None and self._working[1] == "attach":
            return "attaching"
        return "failed" if self._error is not None and self._error.phase == "attach" else "new"

    def status(self) -> dict[str, Any]:
        """Everything, as JSON."""
        with self.lock:
            settings, host, live, who = self.settings, self.host, self.live, self.identity
            newest = max(self.prepared, default=None)
            plan = self.prepared[newest].how if newest is not None else None
            working = self._working
            status = {
                "rank": who.rank,
                "world_size": who.size,
                "host": who.host,
                "pid": who.pid,
                "generation": who.generation,
                "initialised": settings is not None,
                "attached": host is not None,
                "state": self.state(),
                "stream": settings.stream if settings is not None else None,
                "stream_id": host.info.stream_id if host is not None else None,
                "checkpoint": str(settings.checkpoint) if settings is not None else None,
                "mode": settings.mode if settings is not None else None,
                "auto_follow": settings.auto_follow if settings is not None else False,
                "version": self.version,
                "prepared": newest if newest is not None else self.version,
                "plan": plan,
                "preparing": None
                if working is None
                else {"target": working[0], "phase": working[1], "seconds": time.monotonic() - working[2]},
                "answered": self.num_answered,
                "error": self._error.to_json() if self._error is not None else None,
                "dirty": self.lost or self.dirty or None,
                "needs_reload": self.needs_reload or None,
                "asleep": self.asleep or None,
                "stale_cache": self.stale_cache or None,
                "ready": host is not None
                and self.version is not None
                and not (self.broken or self.asleep or self.stale_cache or self.failed_update),
                "session": self.session,
                "routes": None if host is None else _routes(host, live),
                "verified_full": self.verified_full,
                "verifying": self.verifying,
                **self.reports,
            }
        status["checkpoint_version"] = host.checkpoint.version if host is not None else None
        return status


def _routes(host: Host, live: LiveLike | None) -> dict[str, Any]:
    if live is None:
        return {"num_routed": 0, "reload": {}}
    names = host.schema.tensors
    return {
        "num_routed": len(live.routed),
        "reload": {names[index].name: reason for index, reason in sorted(live.unrouted.items())},
    }
