"""`torch-delta doctor`: whether a stream can live in a store, how fast, and what to fix."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from torch_delta.cli.checkup import Checkup
from torch_delta.cli.run import OK, PROBLEM

if TYPE_CHECKING:
    import argparse

    from torch_delta.cli.output import Output
    from torch_delta.store import Store

_STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Check everything; status 1 if something that a stream needs is missing."""
    del arguments
    checkup = Checkup(store)
    output.line(f"{store.url}: trying it out below {checkup.folder}/", style="bold")
    for finding in checkup.run():
        output.line(f"{finding.status:>8}  {finding.name}: {finding.message}", style=_STYLES[finding.status])
        if finding.advice:
            output.line(f"{'':>8}  -> {finding.advice}")
    failed = [finding.name for finding in checkup.findings if finding.status == "failed"]
    output.record(
        {
            "url": store.url,
            "ok": not failed,
            "checks": [asdict(finding) for finding in checkup.findings],
            **asdict(checkup.measured),
        }
    )
    if not failed:
        output.line("a stream can be written and followed here")
        return OK
    may_follow = not {"read"} & set(failed)
    output.line(
        f"no stream can be written here ({', '.join(failed)})"
        + ("; one that is there already can be followed" if may_follow and "write" in failed else "")
    )
    return PROBLEM
