"""The write inside the pause, and its undoing.

Nothing is computed here: old bits are compared, new ones stored, and read back. A failure on the way restores what was
written before it is raised, so the caller hears "nothing happened" or, if even that fails, "torn".
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta import crashpoints
from torch_delta.codec.bits import blocks
from torch_delta.errors import ApplyFailed
from torch_delta.vllm.routing.device import DeviceWrite
from torch_delta.vllm.routing.kernels import NEW_DIFFERS, OK, OLD_DIFFERS, compiled_write
from torch_delta.vllm.routing.targets import Block, Scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_delta.codec.bits import Bits
    from torch_delta.vllm.routing.plan import Plan

JOB_ELEMENTS = 1 << 17  # per unit of work of one thread: some hundred microseconds
_NUMPY_BLOCK = 1 << 14


@dataclass(slots=True)
class _Job:
    """A run of elements of one target; `touched` of them, from its start, may have been written."""

    target: Scatter | Block
    run: Callable[[_Job], tuple[int, int]]
    arrays: tuple[Any, ...]
    start: int
    touched: int = 0


@dataclass(slots=True)
class Undo:
    """What one `write` did: enough to take it back. Shares its arrays with the plan.

    Attributes:
        plan: that was written.
        live: whether it can still be taken back: False once it was.
    """

    plan: Plan
    live: bool
    _jobs: list[_Job]
    _device: DeviceWrite

    @property
    def version(self) -> int:
        """The plan's."""
        return self.plan.version


class Writer:
    """Writes plans with a few threads that are kept, so that the pause starts none.

    Args:
        num_threads: for host memory.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="torch-delta-write")
        list(self._pool.map(lambda _: None, range(num_threads)))

    def write(self, plan: Plan) -> Undo:
        """Compare, write and read back everything.

        Raises:
            ApplyFailed: it could not be; its `undone` says whether live memory is as before.
        """
        undo = Undo(plan, True, _jobs(plan.targets), DeviceWrite([t for t in plan.targets if t.device is not None]))
        try:
            failure = self._run(undo) or undo._device.run()
        except BaseException as error:
            self._take_back(undo, error)
            if isinstance(error, Exception):
                raise ApplyFailed(
                    f"writing version {plan.version} failed with {type(error).__name__}: {error}; live weights are as "
                    "before",
                    version=plan.version,
                    undone=True,
                ) from error
            raise
        if failure is not None:
            differs = _differs(plan, *failure)
            self._take_back(undo, differs)
            raise differs
        return undo

    def rollback(self, undo: Undo) -> None:
        """Restore the bits from before a write, and read them back.

        Raises:
            ApplyFailed: they do not hold; `undone` is False.
        """
        if not undo.live:
            raise ValueError(f"the write of version {undo.version} was taken back already")
        undo.live = False
        wrong = [str(job.target.storage.names[0]) for job in undo._jobs if not _restore(job)]
        wrong += undo._device.restore()
        if wrong:
            raise ApplyFailed(
                f"undoing version {undo.version} failed: {wrong[0]} does not hold its old bits. Live weights are of no "
                "version; reload the engine",
                version=undo.version,
                parameter=wrong[0],
                undone=False,
            )

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _run(self, undo: Undo) -> tuple[Scatter | Block, int, int] | None:
        stop = threading.Event()

        def run(job: _Job) -> tuple[Scatter | Block, int, int] | None:
            if stop.is_set():
                return None
            try:
                crashpoints.reach("vllm.write_job")
                element, outcome = job.run(job)
            except BaseException:
                stop.set()
                raise
            if outcome == OK:
                return None
            stop.set()
            return job.target, job.start + element, outcome

        def run_all(jobs: Sequence[_Job]) -> tuple[Scatter | Block, int, int] | None:
            return next((failure for failure in map(run, jobs) if failure is not None), None)

        shares = _shares(undo._jobs)
        if self.num_threads == 1 or len(shares) < 2:
            return run_all(undo._jobs)
        futures = [self._pool.submit(run_all, share) for share in shares]
        errors = [future.exception() for future in futures]  # waits for all: none may write while others are undone
        for error in errors:
            if error is not None:
                raise error
        return next((failure for failure in (future.result() for future in futures) if failure is not None), None)

    def _take_back(self, undo: Undo, cause: BaseException) -> None:
        try:
            self.rollback(undo)
        except ApplyFailed as error:
            raise error from cause


def _differs(plan: Plan, target: Scatter | Block, element: int, outcome: int) -> ApplyFailed:
    tensor = target.tensor_at(min(element, target.count - 1))
    what = "live bits are not those the plan was made for" if outcome == OLD_DIFFERS else "bits read back differ"
    return ApplyFailed(
        f"writing version {plan.version} into {target.storage.names[0]}: {what}; live weights are as before. "
        "Something else writes to the engine's weights: reload it",
        version=plan.version,
        tensor_index=tensor,
        parameter=target.storage.names[0],
        undone=True,
    )


def prepare_kernels(targets: Sequence[Scatter | Block]) -> None:
    """Compile what a write of these targets needs; never inside a pause."""
    for target in targets:
        if isinstance(target, Scatter) and target.device is None:
            compiled_write(target.index.dtype, target.new.dtype)


def _jobs(targets: Sequence[Scatter | Block]) -> list[_Job]:
    jobs: list[_Job] = []
    for target in targets:
        if target.device is not None:
            continue
        if isinstance(target, Scatter):
            kernel = compiled_write(target.index.dtype, target.new.dtype)
            run = _scatter if kernel is None else _compiled(kernel)
            for start in range(0, target.count, JOB_ELEMENTS):
                part = slice(start, start + JOB_ELEMENTS)
                flat = target.storage.host
                arrays = (flat, target.index[part], target.old[part], target.new[part])
                jobs.append(_Job(target, run, arrays, start))
        else:
            live = np.atleast_1d(target.storage.view(target.offset, target.shape, target.strides))
            old, new = np.atleast_1d(target.old), np.atleast_1d(target.new)
            start = 0
            for where in blocks(live.shape, JOB_ELEMENTS):
                jobs.append(_Job(target, _block, (live[where], old[where], new[where]), start))
                start += new[where].size
    return jobs


def _shares(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Jobs in groups that are worth handing to a thread: many tensors with few changes make one."""
    shares: list[list[_Job]] = []
    room = 0
    for job in jobs:
        if room <= 0:
            shares.append([])
            room = JOB_ELEMENTS
        shares[-1].append(job)
        room -= int(job.arrays[-1].size)
    return shares


def _compiled(kernel: Callable[..., Any]) -> Callable[[_Job], tuple[int, int]]:
    def run(job: _Job) -> tuple[int, int]:
        job.touched = job.arrays[1].size  # an exception inside leaves it unknown; restoring unwritten ones is harmless
        done, outcome = kernel(*job.arrays)
        job.touched = int(done)
        return int(done), int(outcome)

    return run


def _scatter(job: _Job) -> tuple[int, int]:
    """The numpy twin of the kernel."""
    flat, index, old, new = job.arrays
    for at in range(0, index.size, _NUMPY_BLOCK):
        part = slice(at, at + _NUMPY_BLOCK)
        places = index[part].astype(np.intp)
        if not np.array_equal(flat.take(places), old[part]):
            return at, OLD_DIFFERS
        job.touched = min(at + _NUMPY_BLOCK, index.size)
        flat[places] = new[part]
        if not np.array_equal(flat.take(places), new[part]):
            return job.touched, NEW_DIFFERS
    return index.size, OK


def _block(job: _Job) -> tuple[int, int]:
    live, old, new = job.arrays
    if not np.array_equal(live, old):
        return 0, OLD_DIFFERS
    job.touched = new.size
    live[...] = new
    return new.size, OK if np.array_equal(live, new) else NEW_DIFFERS


def _restore(job: _Job) -> bool:
    """Put old bits back where new ones may be; whether they read back."""
    if not job.touched:
        return True
    if isinstance(job.target, Block):
        live, old, _ = job.arrays
        live[...] = old
        return np.array_equal(live, old)
    flat, index, old, _ = job.arrays
    places = index[: job.touched].astype(np.intp)
    before: Bits = old[: job.touched]
    flat[places] = before
    return np.array_equal(flat.take(places), before)
