"""Tables of what `pause.py` measured."""

from __future__ import annotations

import statistics
from typing import Any

from cache_lines import LINE_BYTES
from measure import median_ratio, table

METHODS = ("torch_delta", "vLLM patch loader", "layerwise reload")


def report_comparison(rows: list[dict[str, Any]]) -> str:
    header = ["changed", "elements", *(f"{name} ms" for name in METHODS)]
    header += [
        "to the patch loader",
        "to the reload",
        "plan ms (not paused)",
        "torch_delta peak MB, plan included",
        *(f"{name} peak MB" for name in METHODS[1:]),
    ]
    lines = []
    for row in rows:
        pauses = row["pause_s"]
        ours = pauses[METHODS[0]]
        line: list[object] = [f"{row['fraction']:.1%}", f"{row['changed']:,}"]
        line += [_spread(pauses[name]) for name in METHODS]
        line += [f"{median_ratio(ours, pauses[name]):.3f}" for name in METHODS[1:]]
        line.append(_spread(row["plan_s"]))
        line += [f"{row['peak_bytes'][name] / 1e6:.0f}" for name in METHODS]
        lines.append(line)
    return table(header, lines)


def report_memory(rows: list[dict[str, Any]]) -> str:
    """The pause beside what memory allows."""
    header = [
        "changed",
        "lines touched",
        "MB read and written",
        "each touched once, ms",
        "copying the model, ms",
        "torch_delta / touched once",
        "least possible: touched once / the reload",
        "torch_delta / the reload",
    ]
    lines = []
    for row in rows:
        ours, reload = (row["pause_s"][name] for name in (METHODS[0], METHODS[2]))
        line: list[object] = [f"{row['fraction']:.1%}", f"{row['lines_share']:.1%}"]
        line += [f"{2 * LINE_BYTES * row['num_lines'] / 1e6:.0f}", _spread(row["touch_s"]), _spread(row["copy_s"])]
        pairs = ((ours, row["touch_s"]), (row["touch_s"], reload), (ours, reload))
        line += [f"{median_ratio(one, other):.3f}" for one, other in pairs]
        lines.append(line)
    return table(header, lines)


def report_sizes(rows: list[dict[str, Any]]) -> str:
    header = ["model", "parameters", "changed", "pause ms", "plan ms (not paused)", "peak in the pause MB"]
    lines = [
        [
            row["size"],
            f"{row['num_parameters'] / 1e6:.0f}M",
            f"{row['changed']:,}",
            _spread(row["pause_s"]),
            _spread(row["plan_s"]),
            f"{row['peak_bytes'] / 1e6:.0f}",
        ]
        for row in rows
    ]
    return table(header, lines)


def _spread(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f})"
