"""The write inside the pause, and its undoing.

Nothing is computed here: old bits are compared, new ones stored, and read back. A failure on the way restores what was
written before it is raised, so the caller hears "nothing happened" or, if even that fails, "torn".
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta import crashpoints
from torch_delta.errors import ApplyFailed
from torch_delta.vllm.routing.device import DeviceWrite
from torch_delta.vllm.routing.kernels import OLD_DIFFERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.vllm.routing.jobs import Differs, HostJob
    from torch_delta.vllm.routing.plan import Plan
    from torch_delta.vllm.routing.targets import Block, Scatter


@dataclass(slots=True)
class Undo:
    """What one `write` did: enough to take it back. Shares its arrays with the plan.

    Attributes:
        plan: that was written.
        live: whether it can still be taken back: False once it was.
    """

    plan: Plan
    live: bool
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
        self._pool: ThreadPoolExecutor | None = None
        if num_threads > 1:  # the caller's own thread is one of them
            self._pool = ThreadPoolExecutor(num_threads - 1, thread_name_prefix="torch-delta-write")
            list(self._pool.map(lambda _: None, range(num_threads - 1)))

    def write(self, plan: Plan) -> Undo:
        """Compare, write and read back everything.

        Raises:
            ApplyFailed: it could not be; its `undone` says whether live memory is as before.
        """
        undo = Undo(plan, True, DeviceWrite([t for t in plan.targets if t.device is not None]))
        try:
            failure = self._run(plan.jobs) or undo._device.run()
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
        wrong = [job.name for job in undo.plan.jobs if not _restore(job)]
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
        if self._pool is not None:
            self._pool.shutdown()

    def _run(self, jobs: Sequence[HostJob]) -> Differs | None:
        """All jobs, on this thread and the others; the first failure, once nobody writes any more."""
        for job in jobs:
            job.touched = 0
        waiting = deque(jobs)

        def work() -> Differs | None:
            try:
                while waiting:
                    try:
                        job = waiting.popleft()
                    except IndexError:  # another thread took the last one
                        break
                    crashpoints.reach("vllm.write_job")
                    differs = job.run()
                    if differs is not None:
                        waiting.clear()
                        return differs
            except BaseException:
                waiting.clear()
                raise
            return None

        num_others = min(self.num_threads, len(jobs)) - 1
        others = [self._pool.submit(work) for _ in range(num_others)] if self._pool is not None else []
        try:
            differs = work()
        finally:
            # None may write while others are undone. One that has not begun by now finds nothing to do.
            wait([other for other in others if not other.cancel()])
        found = [other.result() for other in others if not other.cancelled()]
        return next((failure for failure in (differs, *found) if failure is not None), None)

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


def _restore(job: HostJob) -> bool:
    return job.restore()
