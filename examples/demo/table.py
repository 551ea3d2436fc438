"""One line per version, printed as soon as both sides have reported it."""

from __future__ import annotations

from typing import Any

_HEADINGS = ("version", "changed", "bytes", "x smaller", "capture s", "publish s", "fetch s", "apply s")
_WIDTHS = (7, 8, 9, 9, 9, 9, 7, 7)


class Table:
    """Joins the trainer's and the follower's reports (dictionaries of their fields) by version.

    capture: time of rank 0's training thread, inside the optimizer step and after it. publish: from there, in the
    background, until the version existed. fetch: read and checked. apply: decoded, proved and written.
    """

    def __init__(self) -> None:
        self.num_printed = 0
        self._published: dict[int, dict[str, Any]] = {}
        self._followed: dict[int, dict[str, Any]] = {}
        print(_line(_HEADINGS))

    def add(self, side: str, report: dict[str, Any]) -> None:
        """Take one report of the `trainer` or the `follower`, and print what is complete now."""
        (self._published if side == "trainer" else self._followed)[report["version"]] = report
        while (ours := self._published.get(self.num_printed + 1)) is not None:
            theirs = self._report_that_covers(ours["version"])
            if theirs is None:
                return
            print(_line(_cells(ours, theirs)), flush=True)
            self.num_printed += 1

    def _report_that_covers(self, version: int) -> dict[str, Any] | None:
        """The follower's report of this version, or of a later one that it caught up to in one go."""
        later = sorted(followed for followed in self._followed if followed >= version)
        return self._followed[later[0]] if later else None


def _cells(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, ...]:
    version, stored_bytes = ours["version"], ours["stored_bytes"]
    capture_s = ours["step_s"] + ours["capture_s"]
    fetch, apply = f"{theirs['fetch_s']:.3f}", f"{theirs['decode_s'] + theirs['verify_s'] + theirs['apply_s']:.3f}"
    if theirs["version"] != version:
        fetch = apply = f"with {theirs['version']}"
    return (
        str(version),
        f"{ours['num_changed'] / ours['num_elements']:.3%}",
        f"{stored_bytes:,}",
        f"{ours['full_bytes'] / stored_bytes:.0f}" if stored_bytes else "-",
        f"{capture_s:.3f}",
        f"{ours['receipts_s'] + ours['commit_s']:.3f}",
        fetch,
        apply,
    )


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
