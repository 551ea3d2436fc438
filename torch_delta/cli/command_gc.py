"""`torch-delta gc`: deleting what no reader of a stream needs."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch_delta.cli.output import counted, human_bytes
from torch_delta.cli.run import OK, PROBLEM
from torch_delta.config import RetentionConfig
from torch_delta.format.keys import ANCHORS_PREFIX, PARTS_PREFIX
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage
from torch_delta.stream.lineages import walk

if TYPE_CHECKING:
    import argparse

    from torch_delta.cli.output import Output
    from torch_delta.events import RetentionReport
    from torch_delta.store import Store


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Make room in `store` and what continues it, or say what would go; status 1 if something could not go."""
    config = RetentionConfig(
        keep_anchors=arguments.keep_anchors, grace_s=arguments.grace, budget_bytes=arguments.budget
    )
    status = OK
    with contextlib.ExitStack() as stack:
        for stream, via in walk(Stream(store)):
            if via is not None:
                stack.enter_context(stream.store)
                output.line(f"it goes on at {via.root}:", style="bold")
            status = max(status, _clean(stream, config, output, dry_run=arguments.dry_run))
    return status


def _clean(stream: Stream, config: RetentionConfig, output: Output, *, dry_run: bool) -> int:
    store = stream.store
    total_bytes = sum(item.size_bytes for prefix in (PARTS_PREFIX, ANCHORS_PREFIX) for item in store.list(prefix))
    with output.progress("deleting", total_bytes) as advance:
        report = collect_garbage(stream, config, dry_run=dry_run, on_bytes=advance)
    output.record({"url": store.url, **asdict(report), "over_budget_bytes": report.over_budget_bytes})
    _show(output, report)
    return PROBLEM if report.failures or report.holder is not None else OK


def _show(output: Output, report: RetentionReport) -> None:
    if report.holder is not None:
        output.line(f"nothing was done: {report.holder} is deleting here; run this again later", style="yellow")
        return
    verb = "would go" if report.dry_run else "deleted"
    output.line(
        f"{verb}: {_range(report.versions)}, {counted(len(report.anchors), 'anchor')}, "
        f"{counted(report.num_orphans, 'orphaned object')}, {counted(report.num_expired_leases, 'expired lease')}, "
        f"{human_bytes(report.freed_bytes)}"
    )
    for root in report.forks:
        output.line(f"{verb}: {root} beside it, where a writer was killed while it forked this stream")
    if report.floor is None:
        output.line("no version goes: there are not two complete anchors yet", style="yellow")
    else:
        output.line(f"stays: everything from the anchor of version {report.floor} on")
    readers = f"; {counted(report.num_live_leases, 'reader')} with a lease" if report.num_live_leases else ""
    output.line(f"left: {human_bytes(report.kept_bytes)}{readers}")
    if report.over_budget_bytes:
        over = human_bytes(report.over_budget_bytes)
        output.line(f"that is {over} over the budget: have the writer make anchors more often", style="yellow")
    for message in report.failures:
        output.line(f"PROBLEM {message}", style="red")


def _range(versions: tuple[int, ...]) -> str:
    if not versions:
        return "no version"
    first, last = versions[0], versions[-1]
    return f"version {first}" if first == last else f"versions {first} to {last}"
