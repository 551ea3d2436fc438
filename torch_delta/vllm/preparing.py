"""What the background thread does: attach, prepare a version, verify all live weights."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_delta.errors import ApplyFailed, ChainError, DeadlineExceeded, DigestMismatch, RequestRefused
from torch_delta.format.digest import ZERO, Digest
from torch_delta.vllm.attaching import attach
from torch_delta.vllm.background import Job
from torch_delta.vllm.records import How, Prepared
from torch_delta.vllm.tensors import covers_everything
from torch_delta.vllm.verifying import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_delta.receive import Patch
    from torch_delta.vllm.background import Together
    from torch_delta.vllm.config import Settings
    from torch_delta.vllm.host import Host
    from torch_delta.vllm.host_records import BringReport
    from torch_delta.vllm.records import Model
    from torch_delta.vllm.standing import Standing

logger = logging.getLogger("torch_delta")

_EPOCH_S = 30.0  # an init request reaches all ranks within a forward pass of each other
_LOOK_EVERY_S = 0.02
_WATCH_AGAIN_S = 5.0
_MOST_SUCCESSORS = 5  # that a stream goes over to while one version is prepared


class _View(NamedTuple):
    """How one rank stands after the working copy was brought to a version.

    Attributes:
        report: of that.
        start: version of the live weights.
        broken: why only a reload leads on; empty when writes may.
        num_applies: updates begun so far.
        has_moved_on: the working copy is of a successor of the stream.
    """

    report: BringReport
    start: int | None
    broken: str
    num_applies: int
    has_moved_on: bool


class Preparer:
    """Jobs of one rank; each method runs on all ranks at once, in their background threads.

    Args:
        standing: of the rank.
        model: of the rank.
        open_host: opens the working copy for some settings.
        check_summaries: `routing.check_summaries`.
        cancelled: whether the engine is shutting down.
        submit: queues another job.
    """

    def __init__(
        self,
        standing: Standing,
        model: Model,
        *,
        open_host: Callable[[Settings], Host],
        check_summaries: Callable[..., None],
        cancelled: Callable[[], bool],
        submit: Callable[[Job], None],
    ) -> None:
        self._standing = standing
        self._model = model
        self._open_host = open_host
        self._check_summaries = check_summaries
        self._cancelled = cancelled
        self._submit = submit

    def do(self, job: Job, together: Together) -> None:
        """Do one job.

        Raises:
            TorchDeltaError: it failed; the same on every rank.
        """
        settings, attached = self._agree_on_epoch(together)
        if job.kind == "verify":
            verify(self._standing, settings, together, self._cancelled)
            return
        self._standing.clear("init", "attach", "prepare")
        if not attached:
            self._standing.working(job.target, "attach")
            self._attach(settings, together)
        if job.kind == "prepare":
            timeout_s = settings.timeout_s if job.timeout_s is None else job.timeout_s
            for _ in range(_MOST_SUCCESSORS):
                if self._prepare(job, timeout_s, together):
                    return
                self._standing.working(job.target, "attach")
                self._attach(settings, together)

    def _agree_on_epoch(self, together: Together) -> tuple[Settings, bool]:
        """The settings, and whether this engine is attached, once every rank has heard of the same init requests."""
        standing = self._standing

        def look() -> tuple[int, bool]:
            with standing.lock:
                return standing.epoch, standing.host is not None

        deadline_s = time.monotonic() + _EPOCH_S
        while True:
            views = set(together("prepare", _EPOCH_S, look))
            settings = standing.settings
            if len(views) == 1 and settings is not None:
                (_, attached), *_ = views
                return settings, attached
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    f"the ranks of this engine heard different init requests: {sorted(views)}; send it again",
                    phase="agree on the init request",
                    peer="ranks",
                    timeout_s=_EPOCH_S,
                )
            threading.Event().wait(_LOOK_EVERY_S)

    def _need_awake_everywhere(self, settings: Settings, together: Together) -> None:
        together("attach", settings.timeout_s, self._need_awake)

    def _need_awake(self) -> None:
        if self._standing.asleep:
            raise RequestRefused(self._standing.asleep)

    # -- attach -----------------------------------------------------------------------------------------------------

    def _attach(self, settings: Settings, together: Together) -> None:
        """Attach, or attach again where the working copy went over to a successor of the stream."""
        standing = self._standing
        with standing.lock:
            epoch, before = standing.epoch, standing.host
            followed = None
            if before is not None:
                followed = {before.schema.tensors[index].name: digest for index, digest in standing.digests.items()}
        if before is not None:
            before.release()  # its patches are gone, and this rank consumes under one name
        self._need_awake_everywhere(settings, together)
        found = attach(settings, self._model, self._open_host, together, self._cancelled, followed=followed)
        if not standing.adopt(found, epoch):
            found.close()  # another init request came meanwhile; its job is next
            return
        if settings.auto_follow and together.rank == 0:
            threading.Thread(target=self._watch, args=(found.host,), name="torch-delta-follow", daemon=True).start()

    def _watch(self, host: Host) -> None:
        """Prepare every version that appears, for as long as the engine is attached to this working copy."""
        while self._standing.host is host and not self._cancelled():
            try:
                host.watch(lambda version: self._submit(Job("prepare", version, stream_id=host.info.stream_id)))
            except Exception as error:
                if self._standing.host is not host or self._cancelled():
                    return
                self._standing.fail("prepare", error)
                logger.warning("following %s: %s", host.settings.stream, error)
            threading.Event().wait(_WATCH_AGAIN_S)

    # -- prepare ----------------------------------------------------------------------------------------------------

    def _prepare(self, job: Job, timeout_s: float, together: Together) -> bool:
        """Make a version ready to apply; False if the engine has to be attached to a successor of the stream first."""
        standing, target = self._standing, job.target
        with standing.lock:
            host, epoch = standing.host, standing.epoch

        def has_left() -> bool:
            return host is not None and job.stream_id not in {None, host.info.stream_id}

        if job.asked == 0 and job.stream_id is not None and any(together("prepare", timeout_s, has_left)):
            return True  # the watch saw it in a stream that was left since; the next watch begins with where that led
        started_s = time.perf_counter()
        standing.working(target, "fetch")

        def bring() -> _View:
            if host is None:
                raise ChainError("an init request came between; prepare again")
            report = host.bring(
                target,
                timeout_s=timeout_s,
                stream_id=job.stream_id,
                superseded=lambda: standing.num_asked > job.asked > 0,
            )
            with standing.lock:
                routed = standing.live is not None
                broken = standing.broken or ("" if routed else "mode is reload")
                return _View(report, standing.version, broken, standing.num_applies, host.has_moved_on)

        views: list[_View] = together("prepare", timeout_s, bring)
        assert host is not None, "its absence fails on every rank"
        if any(view.has_moved_on for view in views):
            return False
        version = target if target is not None else max(view.report.version for view in views)
        fetched_s = time.perf_counter()
        standing.working(version, "plan")
        broken = next((view.broken for view in views if view.broken), "")
        start = views[together.rank].start
        if not broken and start is not None and all(view.start == start for view in views) and version <= start:
            return True
        if not broken and any(view.start != start or start is None for view in views):
            broken = "the ranks of this engine are at different versions"
        prepared = self._plan(host, views[together.rank], version, timeout_s, together, broken=broken)
        if not standing.offer(prepared, epoch):
            raise ChainError(
                f"an update came between; version {version} was prepared from {start}. Prepare it again",
                local_version=standing.version,
                target=version,
            )
        standing.reports["last_prepare"] = _report(
            version, views[together.rank].report, prepared, started_s=started_s, fetched_s=fetched_s
        )
        return True

    def _plan(
        self,
        host: Host,
        view: _View,
        version: int,
        timeout_s: float,
        together: Together,
        *,
        broken: str,
    ) -> Prepared:
        """Writes where they lead to `version`, else a reload."""
        live, start = self._standing.live, view.start
        if broken:
            return Prepared(start=None, version=version, how="reload", reason=broken)
        assert live is not None
        assert start is not None
        patches: list[Patch] = []
        try:
            together("prepare", timeout_s, lambda: patches.extend(host.patches(start, version)))
        except ChainError as error:
            return Prepared(start=None, version=version, how="reload", reason=error.message)
        made: list[Any] = []

        def plan() -> Any:
            self._need_awake()
            made.append(live.plan(patches, cancelled=self._cancelled))
            return made[0].summary

        increments = _sum(patches)
        summaries = together("prepare", timeout_s, plan)
        routed = {index: increments[index] for index in increments if index in live.routed}
        try:
            self._check_summaries(
                summaries,
                before=dict.fromkeys(routed, ZERO),
                after=routed,
                names=lambda index: host.schema.tensors[index].name,
            )
        except (ApplyFailed, DigestMismatch) as error:
            if any(together("prepare", timeout_s, lambda: self._standing.num_applies != view.num_applies)):
                raise ChainError(
                    f"an update came between while version {version} was prepared; prepare it again",
                    local_version=start,
                    target=version,
                ) from error
            # The live bits are not what the patches lead from: something else wrote to the weights.
            self._standing.spoil(dirty=f"live weights are not version {start} any more: {error.message}")
            return Prepared(start=None, version=version, how="reload", reason=error.message)
        how: How = "patch"
        reason = ""
        if made[0].unrouted:
            reason = f"{len(made[0].unrouted)} changed tensors have no route"
            if covers_everything(host.schema, made[0].unrouted):
                return Prepared(start=None, version=version, how="reload", reason=reason)
            how = "mixed"
        return Prepared(start=start, version=version, how=how, reason=reason, plan=made[0], increments=increments)


def _sum(patches: Iterable[Patch]) -> dict[int, Digest]:
    total: dict[int, Digest] = {}
    for patch in patches:
        for tensor, increment in patch.increments.items():
            total[tensor] = total.get(tensor, ZERO) + increment
    return total


def _report(
    version: int, brought: BringReport, prepared: Prepared, *, started_s: float, fetched_s: float
) -> dict[str, Any]:
    now_s = time.perf_counter()
    return {
        "version": version,
        "from_version": prepared.start,
        "kind": prepared.how,
        "reason": prepared.reason,
        "seconds": now_s - started_s,
        "plan_s": now_s - fetched_s,
        "num_versions": brought.num_versions,
        "num_changed": brought.num_changed,
        "stored_bytes": brought.stored_bytes,
        "wait_s": brought.wait_s,
        "fetch_s": brought.fetch_s,
        "decode_s": brought.decode_s,
        "verify_s": brought.verify_s,
        "apply_s": brought.apply_s,
        "plan_elements": prepared.plan.num_elements if prepared.plan is not None else 0,
        "plan_bytes": prepared.plan.nbytes if prepared.plan is not None else 0,
    }
