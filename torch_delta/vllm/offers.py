"""What a rank can do towards a version that is asked for, found out before any rank does anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

from torch_delta.errors import ChainError, RequestRefused
from torch_delta.vllm.records import Failure, How

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_delta.vllm.config import UpdateInfo
    from torch_delta.vllm.standing import Standing

_STRENGTH: dict[How, int] = {"none": 0, "patch": 1, "mixed": 2, "reload": 3}


class Offer(NamedTuple):
    """What a rank can do towards the version asked for.

    Attributes:
        failure: why it can do nothing; None if it can.
        how: the least that brings it there.
        start: version of its live weights; None if unknown.
        version: that is asked for.
    """

    failure: Failure | None
    how: How
    start: int | None
    version: int


def strongest(ways: Iterable[How]) -> How:
    """The one that does for every rank what any of them needs."""
    return max(ways, key=_STRENGTH.__getitem__)


def make_offer(standing: Standing, info: UpdateInfo) -> Offer:
    """Look at what there is; nothing is changed, and a refusal is part of the offer."""
    try:
        with standing.lock:
            how = _how(standing, info)
            start, version = standing.version, info.version
        if how == "reload":
            _need_copy(standing, info.version)
        return Offer(None, how, start, version)
    except Exception as error:
        return Offer(Failure.of("apply", error), "none", None, info.version)


def _how(standing: Standing, info: UpdateInfo) -> How:
    if standing.settings is None:
        raise RequestRefused(
            "this engine follows no stream; send init_weight_transfer_engine with init_info, or set TORCH_DELTA_STREAM"
        )
    if standing.host is None:
        _refuse_unattached(standing)
    if standing.asleep:
        raise RequestRefused(standing.asleep)
    follows = standing.host.info.stream_id
    if info.stream_id not in {None, follows}:
        raise ChainError(
            f"version {info.version} of stream {info.stream_id} is asked for, and this engine follows stream "
            f"{follows}; prepare that version first",
            stream_id=follows,
            target=info.version,
        )
    if standing.version is not None and info.version < standing.version:
        raise ChainError(
            f"this server is at version {standing.version}, beyond {info.version}; versions are not taken back. "
            "Ask for a newer one, or restart the server from an older checkpoint",
            local_version=standing.version,
            target=info.version,
        )
    if standing.broken or info.mode == "reload":
        return "reload"
    if info.version == standing.version:
        return "none"
    prepared = standing.prepared.get(info.version)
    if prepared is None:
        _refuse_unprepared(standing, info.version)
    return prepared.how


def _refuse_unattached(standing: Standing) -> NoReturn:
    error = standing.error
    if error is not None:
        raise error.error()
    raise RequestRefused("still attaching to the stream; wait until the status says attached, then prepare")


def _refuse_unprepared(standing: Standing, version: int) -> NoReturn:
    there = ", ".join(map(str, sorted(standing.prepared))) or "none"
    error = standing.error
    why = f". The last preparation failed: {error.message}" if error is not None else ""
    raise RequestRefused(
        f"version {version} is not prepared here (live: {standing.version}, prepared: {there}); prepare it "
        f"first, so that nothing is fetched inside the pause{why}",
        version=version,
    )


def _need_copy(standing: Standing, version: int) -> None:
    host = standing.host
    assert host is not None, "as `_how` saw"
    if host.version < version:
        raise ChainError(
            f"{host.checkpoint.path} is at version {host.version}; prepare version {version} first",
            local_version=host.version,
            target=version,
        )
