"""A line, or a JSON object, for every step a checkpoint takes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch_delta.cli.output import human_bytes, times_smaller

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.cli.metered import Metered
    from torch_delta.cli.output import Output
    from torch_delta.receive import ApplyReport

_COLUMNS = (("version", 7), ("from", 6), ("by", 6), ("changed", 13), ("fetched", 9), ("x smaller", 9))
_SECONDS = (("fetch s", 7), ("decode s", 8), ("verify s", 8), ("apply s", 7))


class Steps:
    """Prints reports as they come; the headings before the first one."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._num_shown = 0

    def taken(self, reports: Iterator[ApplyReport], store: Metered) -> Iterator[ApplyReport]:
        """Show reports as they come, and before each one a bar over what is read of the stream until then.

        Args:
            reports: of a follower.
            store: that the follower reads.
        """
        while True:
            # Ended before a line is printed, so that bar and table do not meet on the terminal.
            with self._output.progress("following", None) as advance, store.telling(advance):
                report = next(reports, None)
            if report is None:
                return
            self.show(report)
            yield report

    def show(self, report: ApplyReport) -> None:
        """One more report."""
        self._output.record(asdict(report))
        if self._num_shown == 0:
            self._line([name for name, _ in (*_COLUMNS, *_SECONDS)], style="bold")
        self._num_shown += 1
        seconds = (report.fetch_s, report.decode_s, report.verify_s, report.apply_s)
        self._line(
            [
                str(report.version),
                "-" if report.from_version is None else str(report.from_version),
                report.kind,
                f"{report.num_changed:,}",
                human_bytes(report.stored_bytes),
                times_smaller(report.full_bytes, report.stored_bytes),
                *(f"{value:.3f}" for value in seconds),
            ]
        )
        sys.stdout.flush()

    def _line(self, cells: list[str], style: str = "") -> None:
        widths = [width for _, width in (*_COLUMNS, *_SECONDS)]
        self._output.line("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), style)
