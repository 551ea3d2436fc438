"""What memory itself allows a sparse write: cache lines touched, and the time of touching each of them once.

    python benchmarks/cache_lines.py                  # recorded training steps: lines touched, beside scattered evenly

A cache line is the least that memory gives and takes: 64 bytes, 32 elements of bf16. A change of one element reads and
writes its whole line. `pause.py` measures with `Memory`, in the same run as the pause, how long it takes to do that and
nothing else: one element of each line that the delta touches is read and written, in ascending order, by as many
threads and with the same asking ahead as the real write, but without the comparison, the reading back, the values and
the positions of the other elements. No way of writing the delta can be faster than that by more than noise.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from measure import table
from traces import Pair, names, recorded, synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LINE_BYTES = 64
PER_LINE = LINE_BYTES // 2
"""Elements of bf16."""
DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
_CHUNK = 1 << 16  # lines that a thread takes at a time
_AHEAD = 64


def lines_of(positions: np.ndarray) -> np.ndarray:
    """Numbers of the lines that ascending flat positions of bf16 elements lie in, each once, int64.

    The first element lies at the start of a line, as in everything that torch allocates.
    """
    lines = positions.astype(np.int64) // PER_LINE
    return lines[np.flatnonzero(np.diff(lines, prepend=-1))]


def even_share(density: float) -> float:
    """Share of all lines that is touched where each element changes with this probability, whatever others do."""
    return 1 - (1 - density) ** PER_LINE


class Memory:
    """A buffer as large as a model, to measure what this machine's memory does.

    Args:
        num_elements: of the model, bf16.
        num_threads: that touch or copy.
    """

    def __init__(self, num_elements: int, num_threads: int) -> None:
        num_lines = -(-num_elements // PER_LINE)
        # From torch, so that pages are of the size that a model's are: numpy asks for huge ones.
        shape = (num_lines, LINE_BYTES // 8)
        self._buffer, self._copy = (torch.ones(shape, dtype=torch.int64).numpy() for _ in range(2))
        self._touch = _compiled_touch()
        self._num_threads = num_threads

    def touch_s(self, lines: np.ndarray) -> float:
        """Seconds for reading and writing one word of each of these lines."""
        starts = range(0, lines.size, _CHUNK)
        return self._timed(lambda at: self._touch(self._buffer.ctypes.data, lines[at : at + _CHUNK]), starts)

    def copy_s(self) -> float:
        """Seconds for copying the whole buffer to another one."""
        step = max(1, len(self._buffer) // (8 * self._num_threads))

        def copy(at: int) -> None:
            self._copy[at : at + step] = self._buffer[at : at + step]

        return self._timed(copy, range(0, len(self._buffer), step))

    def _timed(self, work: Callable[[int], Any], starts: Iterable[int]) -> float:
        waiting, lock = iter(starts), threading.Lock()

        def run() -> None:
            while True:
                with lock:
                    at = next(waiting, None)
                if at is None:
                    return
                work(at)

        others = [threading.Thread(target=run) for _ in range(self._num_threads - 1)]
        started = time.perf_counter()
        for other in others:
            other.start()
        run()
        for other in others:
            other.join()
        return time.perf_counter() - started


def _compiled_touch() -> Callable[[int, np.ndarray], None]:
    import numba

    from torch_delta.vllm.routing.kernels import ask_for

    ask, types = ask_for(numba), numba.types

    @numba.extending.intrinsic
    def words(_typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.int64)(address), generate

    def touch(address, lines):
        memory = numba.carray(words(address), 1 << 60)
        ahead = max(0, lines.size - _AHEAD)
        for i in range(ahead):
            ask(address + LINE_BYTES * lines[i + _AHEAD])
            memory[lines[i] * (LINE_BYTES // 8)] ^= np.int64(1)
        for i in range(ahead, lines.size):
            memory[lines[i] * (LINE_BYTES // 8)] ^= np.int64(1)

    return numba.njit([types.void(types.int64, types.int64[::1])], nogil=True)(touch)


def of_pair(pair: Pair) -> dict[str, Any]:
    """Lines that a recorded step touches, beside the same numbers of changes scattered evenly."""
    total, touched, even = 0, 0, 0.0
    for name, old in pair.old.items():
        before, after = (tensor.view(torch.int16).view(-1).numpy() for tensor in (old, pair.new[name]))
        changed = np.flatnonzero(before != after)
        num_lines = -(-before.size // PER_LINE)
        total += num_lines
        touched += lines_of(changed).size
        even += num_lines * even_share(changed.size / before.size)
    return {
        "trace": pair.name,
        "density": pair.density,
        "touched": touched / total,
        "even_in_each_tensor": even / total,
        "even": even_share(pair.density),
    }


def report(rows: list[dict[str, Any]]) -> str:
    even = ["if even within each tensor", "if even over the model"]
    header = ["trace", "changed", "lines touched", *even, "touched / even over the model"]
    shown = []
    for row in rows:
        shares = [f"{row[share]:.1%}" for share in ("touched", "even_in_each_tensor", "even")]
        shown.append([row["trace"], f"{row['density']:.2%}", *shares, f"{row['touched'] / row['even']:.2f}"])
    return table(header, shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES, help="folder of recorded steps")
    parser.add_argument("--only", default="", help="traces whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    found = []
    if arguments.traces.is_dir():
        found = [name for name in names(arguments.traces) if arguments.only in name]
    pairs = (recorded(arguments.traces, name) for name in found) if found else iter([synthetic(width=256)])
    rows = [of_pair(pair) for pair in pairs]
    print(report(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
