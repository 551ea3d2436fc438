"""Named places where a test can end the process: how "killed at any moment" is tested at every moment that matters.

Write paths call `reach("store.linked")` between two effects that a crash could separate. Unarmed, a call is one set
lookup. A test arms a point in this process, or in a child through one environment variable:

    with crashpoints.armed("stream.commit_written", raising):           # a callable runs there, e.g. one that raises
        ...
    subprocess.run([...], env={**os.environ, "TORCH_DELTA_CRASH_AT": "store.linked:3:kill"})   # SIGKILL, third time

For tests only, and harmless otherwise: the variable is read once, at the first `reach` of the process, and all it can
do is end the process it was set for, which whoever sets a process's environment can do anyway. A value that names no
registered point is an error, so that a test with a typo fails instead of passing without its crash.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

ENVIRONMENT = "TORCH_DELTA_CRASH_AT"
EXIT_CODE = 86

POINTS = frozenset(
    {
        # store/local.py, in the order of one put_new; then the hint and the deletion
        "store.temp_created",
        "store.temp_written",
        "store.temp_synced",
        "store.linked",
        "store.temp_removed",
        "store.directory_synced",
        "store.hint_written",
        "store.hint_renamed",
        "store.deleted",
        # stream/stream.py
        "stream.schema_written",
        "stream.info_written",
        "stream.commit_written",
        "stream.head_written",
        # publish/, in the order of one version: every rank, then the coordinator; then one anchor
        "publish.encoded",
        "publish.part_put",
        "publish.receipt_set",
        "publish.receipts_heard",
        "publish.committed",
        "publish.fork_noted",
        "publish.lineage_created",
        "publish.successor_written",
        "publish.anchor_staged",
        "publish.anchor_file_put",
        "publish.anchor_manifest_put",
        # stream/claim.py and collect.py, in the order of one pass of retention
        "gc.claimed",
        "gc.commit_deleted",
        "gc.part_deleted",
        "gc.manifest_deleted",
        "gc.file_deleted",
        "gc.orphan_deleted",
        "gc.fork_object_deleted",
        # receive/: copying a base or an anchor in, one version, syncing the weights
        "receive.file_copied",
        "receive.install_staged",
        "receive.install_begun",
        "receive.install_file",
        "receive.install_state",
        "receive.schema_kept",
        "receive.patches_dropped",
        "receive.parts_fetched",
        "receive.version_merged",
        "receive.patch_kept",
        "receive.next_written",
        "receive.tensor_written",
        "receive.weights_written",
        "receive.state_switched",
        "receive.weights_synced",
        # vllm/routing/: before each unit of work of a write to live parameters
        "vllm.write_job",
        "vllm.written",
        "vllm.reload_begun",
    }
)
"""Every point there is. A test compares this with the calls of `reach` in the package."""

Action = Literal["kill", "exit"] | Callable[[], object]

_lock = threading.Lock()
_armed: dict[str, tuple[int, Action]] | None = None  # None: the environment was not read yet
_counts: Counter[str] = Counter()


def reach(name: str) -> None:
    """Mark that execution passes the point `name`; whatever is armed there happens now.

    Raises:
        ValueError: no such point is registered.
    """
    if name not in POINTS:
        raise _unknown(name)
    if _armed is None:
        _read_environment()
    if not _armed:
        return
    with _lock:
        _counts[name] += 1
        nth, action = _armed.get(name, (0, "kill"))
        fires = _counts[name] == nth
    if fires:
        _perform(action)


def arm(name: str, action: Action = "kill", *, nth: int = 1) -> None:
    """Let `action` happen when `name` is reached for the `nth` time from now.

    Args:
        name: a registered point.
        action: ``"kill"`` (SIGKILL: no handler, no cleanup), ``"exit"`` (`os._exit` with `EXIT_CODE`), or a callable
            that runs there and may raise.
        nth: counted from 1.

    Raises:
        ValueError: no such point, or `nth` below 1.
    """
    global _armed  # noqa: PLW0603 - one process, one set of points
    if name not in POINTS:
        raise _unknown(name)
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    with _lock:
        _counts[name] = 0
        _armed = {**(_armed or {}), name: (nth, action)}


def disarm() -> None:
    """Forget all armed points and counts; the environment is not read again."""
    global _armed  # noqa: PLW0603 - one process, one set of points
    with _lock:
        _armed = {}
        _counts.clear()


@contextlib.contextmanager
def armed(name: str, action: Action, *, nth: int = 1) -> Iterator[None]:
    """`arm` for the length of a with-block; at its normal end the point must have been reached.

    Raises:
        AssertionError: the block ended without reaching the point: the test did not test what it says.
    """
    arm(name, action, nth=nth)
    try:
        yield
        if _counts[name] < nth:
            raise AssertionError(f"crash point {name} was reached {_counts[name]} times, armed for the {nth}th")
    finally:
        disarm()


def count(name: str) -> int:
    """How often `name` was reached while any point was armed."""
    if name not in POINTS:
        raise _unknown(name)
    return _counts[name]


def _read_environment() -> None:
    """Arm what the environment asks for: ``NAME[:NTH[:kill|exit]]``."""
    global _armed  # noqa: PLW0603 - one process, one set of points
    value = os.environ.get(ENVIRONMENT)
    if value is None:
        _armed = {}
        return
    name, _, rest = value.partition(":")
    nth, _, action = rest.partition(":")
    if not (nth or "1").isdecimal() or action not in {"", "kill", "exit"}:
        raise ValueError(f"{ENVIRONMENT}={value!r}: expected NAME[:NTH[:kill|exit]]")
    arm(name, "exit" if action == "exit" else "kill", nth=int(nth or "1"))


def _perform(action: Action) -> None:
    if action == "kill":
        _kill()
    if action == "exit":
        os._exit(EXIT_CODE)
    assert not isinstance(action, str), action
    action()


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal arrives before this thread does anything visible
        signal.pause()


def _unknown(name: str) -> ValueError:
    return ValueError(f"no crash point {name!r}; register it in torch_delta/crashpoints.py. Known: {sorted(POINTS)}")
