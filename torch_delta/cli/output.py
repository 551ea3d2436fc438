"""What a command shows: tables and progress bars for people, or JSON for programs. Nothing else prints."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PIPE_COLUMNS = 160  # of a table that goes into a file or a pipe, where no terminal gives a width
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class _Console(Console):
    """Leaves a reader that went away to the caller, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Output:
    """The two channels of one command.

    With `as_json`, stdout carries JSON objects, one per line, and nothing else; the methods for people do nothing then.
    Progress bars and errors go to stderr.

    Args:
        as_json: for programs.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        width = None if sys.stdout.isatty() else _PIPE_COLUMNS
        self._console = _Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)

    def record(self, record: dict[str, Any]) -> None:
        """One JSON object, for programs only."""
        if self.as_json:
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """A line of text, for people only. No markup is read in it: names come from files that others wrote."""
        if not self.as_json:
            self._console.print(Text(text, style=style), soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0) -> None:
        """A table, for people only; the first `left` columns are flush left, the others flush right."""
        if self.as_json:
            return
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for at, heading in enumerate(headings):
            table.add_column(heading, justify="left" if at < left else "right", no_wrap=at >= left, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    @contextlib.contextmanager
    def progress(self, task: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        """A bar over bytes on a terminal; yields the function that advances it, which any thread may call.

        Args:
            task: what is being done, in a few words.
            total_bytes: of all of it; None if nobody can tell: then the bar shows how much is done and that it goes on.
        """
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=self.as_json or not sys.stderr.isatty(),
        )
        with bar:
            number = bar.add_task(task, total=total_bytes)
            yield lambda num_bytes: bar.advance(number, num_bytes)

    @contextlib.contextmanager
    def working(self, task: str) -> Iterator[None]:
        """A spinner on a terminal, for work that cannot tell how far it is."""
        if self.as_json or not sys.stderr.isatty():
            yield
            return
        with Console(stderr=True).status(Text(task)):
            yield


def human_bytes(num_bytes: float) -> str:
    """Three digits and a binary unit: ``1.21 MiB``; whole bytes below a KiB."""
    size, unit = float(num_bytes), _UNITS[0]
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1024
    if unit == "B":
        return f"{size:.0f} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{digits}f} {unit}"


def human_seconds(seconds: float) -> str:
    """An age or a duration in its largest fitting unit: ``42s``, ``3m``, ``5h``, ``12d``."""
    for unit, limit_s in (("s", 120.0), ("m", 7200.0), ("h", 172_800.0)):
        if seconds < limit_s:
            return f"{seconds / {'s': 1, 'm': 60, 'h': 3600}[unit]:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def times_smaller(full_bytes: int, stored_bytes: int) -> str:
    """How many times smaller than a full copy; ``-`` if nothing was stored."""
    if not stored_bytes:
        return "-"
    ratio = full_bytes / stored_bytes
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def counted(number: int, noun: str) -> str:
    """``1 part``, ``1,200 parts``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def share(part: int, whole: int) -> str:
    """A percentage with three decimals; ``-`` of nothing."""
    return f"{part / whole:.3%}" if whole else "-"
