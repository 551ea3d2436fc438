"""Attaching an engine to a stream: the working copy, the routes, and which version the live weights are.

Live values are compared with the working copy, tensor by tensor. If all are equal, its version is theirs. Otherwise it
depends on the files that vLLM was started from. If they are the working copy's version, and nothing was written into
the live weights since, the tensors that differ are changed by their loader or by the backend, and take the reload path.
If they are the base and the copy is further on, the engine joined late; if something was written, it followed another
stream before: either way its first update reloads everything. Anything else is not this stream's weights: refused,
unless a reload was asked for.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_delta.errors import BaseMismatch, DeadlineExceeded, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.vllm.background import Together
    from torch_delta.vllm.config import Settings
    from torch_delta.vllm.host import Host
    from torch_delta.vllm.records import LiveLike, Model

_NAMES_SHOWN = 5
_MOST_ROUNDS = 5


class Attached(NamedTuple):
    """What an engine knows once it is attached.

    Attributes:
        host: the working copy, with this rank registered as a consumer.
        live: the routed model; None for an engine that only reloads.
        proved: the routes were compared with known bits.
        version: of the live weights, None if only a reload leads on.
        digests: of the live weights; empty without a version.
        needs_reload: why only a reload leads on; empty with a version.
        report: seconds by phase.
        verified: what `verified_full` says of the comparison; None without one.
    """

    host: Host
    live: LiveLike | None
    proved: bool
    version: int | None
    digests: Mapping[int, Digest]
    needs_reload: str
    report: Mapping[str, float]
    verified: Mapping[str, Any] | None

    def close(self) -> None:
        """Let go of it all, where it is not wanted after all."""
        self.host.close()
        if self.live is not None:
            self.live.close()


class _Found(NamedTuple):
    """What one rank found when it compared its live values with the working copy."""

    version: int
    differing: Mapping[int, str]
    digests: Mapping[int, Digest]
    seconds: float


def attach(
    settings: Settings,
    model: Model,
    open_host: Callable[[Settings], Host],
    together: Together,
    cancelled: Callable[[], bool],
    *,
    followed: Mapping[str, Digest] | None = None,
) -> Attached:
    """Attach one rank; all ranks at once.

    Args:
        settings: of the engine.
        model: of this rank.
        open_host: opens the working copy.
        together: the job, on all ranks.
        cancelled: asked while weights are compared.
        followed: digests of the live weights by name, where they came from a stream that this one continues (empty if
            they are of no version); None at the start, when they are what vLLM loaded.

    Raises:
        TorchDeltaError: the store has no such stream or does not answer, the working copy cannot be opened, or the
            served weights are not the stream's.
    """
    opened: list[Host] = []
    live: LiveLike | None = None
    started_s = time.perf_counter()
    try:
        together("attach", settings.timeout_s, lambda: opened.append(open_host(settings)))
        host = opened[0]
        opened_s = time.perf_counter()
        live = None if settings.mode == "reload" else probe(host, model, settings, together)
        probed_s = time.perf_counter()
        found = _compare_all(host, live, settings, together, cancelled)
        if followed is None:
            placed = _place(host, live, found, settings, together, holds_served_files=model.holds_served_files)
        else:
            placed = _place_followed(host, live, found, followed, together)
        if placed.version is None and live is not None:
            # What differed was withdrawn, and may be right as soon as the weights are. Once more, for then.
            live.close()
            live = probe(host, model, settings, together)
            placed = placed._replace(live=live, proved=False)
    except BaseException:
        for host in opened:
            host.close()
        if live is not None:
            live.close()
        raise
    report = {
        "seconds": time.perf_counter() - started_s,
        "open_s": opened_s - started_s,
        "probe_s": probed_s - opened_s,
        "prove_s": time.perf_counter() - probed_s,
    }
    return placed._replace(report=report)


def probe(host: Host, model: Model, settings: Settings, together: Together) -> LiveLike:
    """Find the routes of all ranks."""
    found: list[LiveLike] = []

    def one() -> Any:
        found.append(model.probe(host.schema))
        return found[0].reach

    reaches = together("attach", settings.timeout_s, one)
    found[0].settle(reaches, together.rank)
    return found[0]


def _place(
    host: Host,
    live: LiveLike | None,
    found: list[_Found],
    settings: Settings,
    together: Together,
    *,
    holds_served_files: bool,
) -> Attached:
    """Say which version the live weights are; see the top of this file."""
    mine = found[together.rank]
    attached = Attached(host, live, live is not None, mine.version, mine.digests, "", {}, _verified(host, live, mine))
    differing = {index: reason for one in found for index, reason in one.differing.items()}
    suspects = sorted(differing) or _uncompared(host, live, mine, holds_served_files=holds_served_files)
    if not suspects:
        return attached
    served = together("attach", settings.timeout_s, lambda: host.served_version(mine.digests, mine.version))[0]
    if served == mine.version and holds_served_files:
        if live is not None:
            live.withdraw(differing)
        return attached
    unknown = attached._replace(version=None, digests={}, proved=False, verified=None)
    if served == 0 or host.serves_itself or (served is not None and not holds_served_files):
        return unknown._replace(
            needs_reload=f"the live weights are not those of version {mine.version}, which this host is at; the next "
            "update reloads all weights"
        )
    if settings.mode == "reload":
        return unknown._replace(needs_reload="the server was not started from this stream's weights")
    names = tuple(host.schema.tensors[index].name for index in suspects)
    raise BaseMismatch(
        f"{host.served!r}, which this server was started from, is neither the base of {settings.stream} nor its "
        f"version {mine.version}: {len(names)} live tensors differ, such as {', '.join(names[:_NAMES_SHOWN])}. Start "
        'the server from the base of the stream or from a pulled checkpoint, or send init_info with mode "reload" to '
        "replace all weights",
        tensors=names,
    )


def _place_followed(
    host: Host, live: LiveLike | None, found: list[_Found], followed: Mapping[str, Digest], together: Together
) -> Attached:
    """The same where the live weights came from a stream that this one continues: its version, or reloaded."""
    mine = found[together.rank]
    uncompared = host.schema.data_indices if live is None else live.unrouted
    same = not any(one.differing for one in found) and all(
        followed.get(host.schema.tensors[index].name) == mine.digests[index] for index in uncompared
    )
    if same:
        return Attached(host, live, live is not None, mine.version, mine.digests, "", {}, _verified(host, live, mine))
    reason = (
        f"{host.settings.stream} goes on as stream {host.info.stream_id}, and this engine was not at the version it "
        "goes on from; the next update reloads all weights"
    )
    return Attached(host, live, proved=False, version=None, digests={}, needs_reload=reason, report={}, verified=None)


def _compare_all(
    host: Host, live: LiveLike | None, settings: Settings, together: Together, cancelled: Callable[[], bool]
) -> list[_Found]:
    """Compare on every rank, with working copies that are at one version."""

    def compare() -> _Found:
        with host.reading(timeout_s=settings.timeout_s) as snapshot:
            # Before anything newer can be applied: no patch comes and goes between this look and the registration.
            host.consume(snapshot.version)
            started_s = time.perf_counter()
            differing = live.prove(snapshot.weights.read, cancelled=cancelled) if live is not None else {}
            if cancelled():
                raise RequestRefused("interrupted while the live weights were compared; prepare again")
            return _Found(snapshot.version, differing, snapshot.digests, time.perf_counter() - started_s)

    for _ in range(_MOST_ROUNDS):
        found: list[_Found] = together("attach", settings.timeout_s, compare)
        newest = max(one.version for one in found)
        if all(one.version == newest for one in found):
            return found
        # Another engine moved the working copy between two ranks' looks, or ranks on other hosts have copies of theirs.
        together("attach", settings.timeout_s, functools.partial(host.bring, newest, timeout_s=settings.timeout_s))
    raise DeadlineExceeded(
        f"{host.checkpoint.path} moved on {_MOST_ROUNDS} times while {len(found)} ranks compared their weights with "
        "it; prepare again",
        phase="compare the live weights",
        peer=str(host.checkpoint.path),
        timeout_s=settings.timeout_s,
    )


def _uncompared(host: Host, live: LiveLike | None, found: _Found, *, holds_served_files: bool) -> list[int]:
    """Tensors without a route that may be of another version than the working copy's."""
    base = host.base_digests()
    if live is None:
        return list(base)
    if not holds_served_files:
        return list(live.unrouted)
    return [index for index in live.unrouted if found.digests[index] != base[index]]


def _verified(host: Host, live: LiveLike | None, found: _Found) -> dict[str, Any] | None:
    if live is None:
        return None
    return {
        "version": found.version,
        "ok": True,
        "seconds": found.seconds,
        "num_tensors": len(live.routed),
        "bytes": sum(host.schema.tensors[index].nbytes for index in live.routed),
        "wrong": [],
    }
