"""Which stream a version is of, where a restarted trainer continued the stream in another and numbers began anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.errors import ServerRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.vllm.fleet.reports import PrepareReport


def tell_apart(prepared: Mapping[str, PrepareReport], *, known: str | None) -> tuple[str | None, dict[str, Exception]]:
    """Find servers that prepared the version of another stream than the rest.

    The stream that the fleet was at before is not the newest where some went on from it. Otherwise servers that differ
    follow streams that have nothing to do with each other, and nobody can tell which of them is meant.

    Args:
        prepared: reports of one version, by URL.
        known: id of the stream that the fleet was at before; None if that is not known.

    Returns:
        Id of the stream that the version is of, None if no server says or it cannot be told; and an error for each
        server that prepared it of another.
    """
    found = {report.stream_id for report in prepared.values()} - {None}
    ids = found - {known} if len(found) > 1 else found
    newest = next(iter(ids)) if len(ids) == 1 else None
    wrong = {url: report for url, report in prepared.items() if ids and report.stream_id != newest}
    right = newest if newest is not None else " and ".join(sorted(map(str, ids)))
    return newest, {
        url: ServerRefused(
            f"prepare: server {url} prepared version {report.version} of stream {report.stream_id}, others of the "
            f"fleet that of {right}; do all of them follow one stream?",
            url=url,
            phase="prepare",
            status=None,
        )
        for url, report in wrong.items()
    }
