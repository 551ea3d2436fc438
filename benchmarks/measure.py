"""What every benchmark here shares: quiet timing, medians, Markdown tables, the machine in one line.

Rules the scripts keep: both sides of a comparison run in one process, interleaved, and swap who goes first from repeat
to repeat; dirty pages are written back before each timed part, so that nobody pays for the previous part's writes;
ratios are medians of the per-repeat ratios, so that a slow minute hits both sides of a ratio alike.
"""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclass
class Samples:
    """Seconds of the repeats of one timed part, in the order they ran."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest repeat, in seconds."""
        return min(self.seconds), max(self.seconds)


def timed(work: Callable[[], object], *, flush: bool = True) -> float:
    """Seconds that `work` takes, after writeback of everything dirty (`flush`)."""
    if flush:
        os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the repeats of ours / theirs; both hold one number per repeat."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A GitHub Markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """The facts a reader needs beside a number; nothing that names the host."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or "unknown",
    )
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


@contextmanager
def count_fsyncs() -> Iterator[list[int]]:
    """Count os.fsync and os.fdatasync of this process while the block runs; for an untimed pass only.

    Yields:
        A list of one integer, the count so far.
    """
    count = [0]
    lock = threading.Lock()
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def counting(name: str) -> Callable[[int], None]:
        def call(fd: int) -> None:
            with lock:
                count[0] += 1
            real[name](fd)

        return call

    for name in real:
        setattr(os, name, counting(name))
    try:
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)
