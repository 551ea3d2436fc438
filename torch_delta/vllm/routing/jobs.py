"""Units of work of a write on the host: made with the plan, so that in the pause they only run.

A job compares, writes and reads back a run of elements, and can put the old bits back where it may have written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torch_delta.codec.bits import blocks
from torch_delta.vllm.routing.kernels import NEW_DIFFERS, OK, OLD_DIFFERS, compiled_write
from torch_delta.vllm.routing.targets import Batch, Block, Scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch_delta.codec.bits import Bits

JOB_ELEMENTS = 1 << 16  # some hundred microseconds of one thread
_NUMPY_BLOCK = 1 << 14


class Differs(NamedTuple):
    """Live bits that are not what they should be.

    Attributes:
        target: in which.
        element: of it, at or shortly before the first such.
        outcome: `OLD_DIFFERS` or `NEW_DIFFERS`.
    """

    target: Scatter | Block
    element: int
    outcome: int


class ScatterJob:
    """Elements `start` to `end` of a batch.

    Attributes:
        touched: elements from the start on that may have been written.
    """

    def __init__(self, batch: Batch, start: int, end: int, kernel: Callable[..., Any] | None) -> None:
        self.touched = 0
        self._batch, self._start, self._end = batch, start, end
        self._segment = batch.segment_of(start)
        self._run = self._numpy if kernel is None else self._compiled
        self._kernel = kernel

    def run(self) -> Differs | None:
        """Compare, write, read back."""
        at, outcome = self._run()
        if outcome == OK:
            return None
        return Differs(*self._batch.locate(min(at, self._end - 1)), outcome)

    def restore(self) -> bool:
        """Put old bits back where new ones may be; whether they read back."""
        batch = self._batch
        held = True
        for segment, part in self._parts(self._start, self._start + self.touched):
            flat = batch.scatters[segment].storage.host
            assert flat is not None
            places, old = batch.index[part].astype(np.intp), batch.old[part]
            flat[places] = old
            held &= np.array_equal(flat.take(places), old)
        return held

    @property
    def name(self) -> str:
        """Of the first parameter it writes to."""
        return str(self._batch.scatters[self._segment].storage.names[0])

    def _compiled(self) -> tuple[int, int]:
        batch = self._batch
        self.touched = self._end - self._start  # an exception leaves it unknown; restoring unwritten ones is harmless
        assert self._kernel is not None
        tables = batch.addresses, batch.ends, batch.index, batch.old, batch.new
        at, outcome = self._kernel(*tables, self._segment, self._start, self._end)
        self.touched = int(at) - self._start
        return int(at), int(outcome)

    def _numpy(self) -> tuple[int, int]:
        """The twin of the kernel."""
        batch = self._batch
        for segment, run in self._parts(self._start, self._end):
            flat = batch.scatters[segment].storage.host
            assert flat is not None
            for at in range(run.start, run.stop, _NUMPY_BLOCK):
                part = slice(at, min(at + _NUMPY_BLOCK, run.stop))
                places = batch.index[part].astype(np.intp)
                if not np.array_equal(flat.take(places), batch.old[part]):
                    return at, OLD_DIFFERS
                self.touched = part.stop - self._start
                flat[places] = batch.new[part]
                if not np.array_equal(flat.take(places), batch.new[part]):
                    return part.stop, NEW_DIFFERS
        return self._end, OK

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, slice]]:
        segment = self._segment
        while start < end:
            stop = min(end, int(self._batch.ends[segment]))
            if stop > start:
                yield segment, slice(start, stop)
            start, segment = max(start, stop), segment + 1


class BlockJob:
    """A part of a block.

    Attributes:
        touched: elements that may have been written: all or none.
    """

    def __init__(self, block: Block, start: int, live: Bits, old: Bits, new: Bits) -> None:
        self.touched = 0
        self._block, self._start = block, start
        self._live, self._old, self._new = live, old, new

    def run(self) -> Differs | None:
        """Compare, write, read back."""
        if not np.array_equal(self._live, self._old):
            return Differs(self._block, self._start, OLD_DIFFERS)
        self.touched = self._new.size
        self._live[...] = self._new
        if not np.array_equal(self._live, self._new):
            return Differs(self._block, self._start, NEW_DIFFERS)
        return None

    def restore(self) -> bool:
        """Put old bits back if new ones may be there; whether they read back."""
        if not self.touched:
            return True
        self._live[...] = self._old
        return np.array_equal(self._live, self._old)

    @property
    def name(self) -> str:
        """Of the parameter it writes to."""
        return str(self._block.storage.names[0])


HostJob = ScatterJob | BlockJob


def make_jobs(targets: Iterable[Scatter | Block]) -> tuple[HostJob, ...]:
    """Cut the writes to host memory into jobs; compiles what they need, and moves the scatters' arrays together."""
    jobs: list[HostJob] = []
    alike: dict[tuple[Any, ...], list[Scatter]] = {}
    for target in targets:
        if target.device is not None:
            continue
        if isinstance(target, Scatter):
            alike.setdefault((target.index.dtype, target.new.dtype, target.is_aligned), []).append(target)
            continue
        live = np.atleast_1d(target.storage.view(target.offset, target.shape, target.strides))
        old, new = np.atleast_1d(target.old), np.atleast_1d(target.new)
        start = 0
        for where in blocks(live.shape, JOB_ELEMENTS):
            jobs.append(BlockJob(target, start, live[where], old[where], new[where]))
            start += new[where].size
    for (index, bits, is_aligned), scatters in alike.items():
        batch = Batch(scatters)
        kernel = compiled_write(index, bits) if is_aligned else None
        total = int(batch.index.size)
        jobs += [
            ScatterJob(batch, start, min(start + JOB_ELEMENTS, total), kernel)
            for start in range(0, total, JOB_ELEMENTS)
        ]
    return tuple(jobs)
