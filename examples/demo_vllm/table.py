"""One line per version while training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.demo_vllm.client import Client

_HEADINGS = ("version", "reward", "changed", "bytes", "x smaller", "prepare s", "tokens meanwhile", "pause s", "gap s")
_WIDTHS = (7, 7, 8, 10, 9, 9, 16, 8, 6)

EXPLANATION = """\
reward: share of the wanted tokens in rollouts of this version. changed: of all weights, in bf16. prepare: the server
fetched, decoded and verified the version while it generated; tokens meanwhile: what the client's stream got in that
time. pause: of the server, from pausing to resuming. gap: the longest silence of the client's stream around it."""


class Table:
    """Prints the trainer's reports, beside what the client saw."""

    def __init__(self) -> None:
        print(_line(_HEADINGS))

    def add(self, report: dict[str, Any], client: Client) -> None:
        """Print the line of a version."""
        began, prepared = report.get("preparing", (0.0, 0.0))
        if report["version"] == 0:
            cells = ["0", f"{report['reward']:.3f}", *["-"] * (len(_WIDTHS) - 2)]
        else:
            published = report["published"]
            cells = [
                str(report["version"]),
                f"{report['reward']:.3f}",
                f"{published['num_changed'] / published['num_elements']:.1%}",
                f"{published['stored_bytes']:,}",
                f"{published['full_bytes'] / max(1, published['stored_bytes']):.1f}",
                f"{prepared - began:.3f}",
                str(client.num_between(began, prepared)),
                f"{report['pause_s']:.3f}",
                f"{client.longest_gap_s(began, report['updated']):.2f}",
            ]
        print(_line(cells), flush=True)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
