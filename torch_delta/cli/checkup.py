"""What `torch-delta doctor` tries on a store: all that a stream asks of it, below a folder of its own, then removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from torch_delta.errors import ObjectExists, ObjectNotFound, StoreError, TorchDeltaError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch_delta.store import Store

Status = Literal["ok", "warning", "failed", "skipped"]
Check: TypeAlias = "Callable[[Checkup], str]"

NUM_RACERS: Final = 8
NUM_ROUNDS: Final = 3
NUM_SMALL: Final = 8
SMALL_BYTES: Final = 4 << 10
LARGE_BYTES: Final = 32 << 20
_PIECE_BYTES: Final = 1 << 20
_MOST_SKEW_S: Final = 60.0
_VISIBLE_WITHIN_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check and how it ended."""

    name: str
    """Of the check."""
    status: Status
    """``"failed"`` is a need of a stream that is not met."""
    message: str
    """What was found."""
    advice: str = ""
    """What to do about it; empty if nothing."""


class NotMet(Exception):
    """A check found that a promise is broken."""

    def __init__(self, message: str, advice: str, *, is_needed: bool = True) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.is_needed = is_needed


@dataclass(kw_only=True, slots=True)
class Measured:
    """Figures of this machine and this store; None where a check did not get that far."""

    put_s: float | None = None
    """Median time of a small put, seconds."""
    get_s: float | None = None
    """Median time of a small get, seconds."""
    stat_s: float | None = None
    """Median time of a poll, seconds."""
    put_bytes_per_s: float | None = None
    """Of one large streamed put."""
    get_bytes_per_s: float | None = None
    """Of one large get."""
    clock_skew_s: float | None = None
    """How far the store's clock is ahead of this machine's, seconds; exact to about a second."""


@dataclass(slots=True)
class Checkup:
    """One examination.

    Attributes:
        store: the patient.
        folder: under which all its objects lie.
        measured: figures so far.
        findings: checks so far.
    """

    store: Store
    folder: str = field(default_factory=lambda: f"doctor/{secrets.token_hex(8)}")
    measured: Measured = field(default_factory=Measured)
    findings: list[Finding] = field(default_factory=list)
    _keys: list[str] = field(default_factory=list)

    def run(self) -> Iterator[Finding]:
        """Try one thing after another; what needs a right that is missing is skipped."""
        try:
            may_read = yield from self._one("read", _read)
            may_write = yield from self._one("write", _write if may_read else None)
            for name, check in _NEED_WRITING:
                yield from self._one(name, check if may_write else None)
        finally:
            for key in self._keys:
                with contextlib.suppress(TorchDeltaError):
                    self.store.delete(key)

    def key(self, name: str) -> str:
        """A key that is removed at the end."""
        key = f"{self.folder}/{name}"
        self._keys.append(key)
        return key

    def _one(self, name: str, check: Check | None) -> Generator[Finding, None, bool]:
        status: Status = "ok"
        message = advice = ""
        try:
            if check is None:
                status, message = "skipped", "needs what failed above"
            else:
                message = check(self)
        except NotMet as error:
            status, message, advice = "failed" if error.is_needed else "warning", error.message, error.advice
        except StoreError as error:
            status, message = "failed", str(error)  # which says what to do
        finding = Finding(name=name, status=status, message=message, advice=advice)
        self.findings.append(finding)
        yield finding
        return status in {"ok", "warning"}


def _read(checkup: Checkup) -> str:
    """Credentials, and that "not there" can be told from "may not look"."""
    try:
        checkup.store.stat(f"{checkup.folder}/absent")
    except ObjectNotFound:
        pass
    else:
        raise NotMet("an object that nobody made is there", "Is something answering every request with 200?")
    if [*checkup.store.list(f"{checkup.folder}/")]:
        raise NotMet("a folder that nobody made has objects", "Check that the URL names a folder of a bucket")
    return "access is granted, listing works, and an absent object is told from a forbidden one"


def _write(checkup: Checkup) -> str:
    key, content = checkup.key("small"), secrets.token_bytes(SMALL_BYTES)
    checkup.store.put_new(key, content)
    found = checkup.store.get(key)
    if found != content or checkup.store.get_range(key, 100, 50) != content[100:150]:
        raise NotMet("other bytes were read than written", "Do not use this store: something changes objects")
    return "a small object was written and read back"


def _create_once(checkup: Checkup) -> str:
    """The promise a stream rests on; tried in earnest, because some services accept the condition and ignore it."""
    advice = (
        "Do not write streams here: two trainers could overwrite each other unnoticed. Use a service that honours "
        "conditional writes, or a file system with hard links"
    )
    key = f"{checkup.folder}/small"
    try:
        checkup.store.put_new(key, b"second")
    except ObjectExists:
        pass
    else:
        raise NotMet("an object was created although its name was taken", advice)
    for number in range(NUM_ROUNDS):
        key = checkup.key(f"race-{number}")
        start = threading.Barrier(NUM_RACERS)
        with ThreadPoolExecutor(NUM_RACERS) as pool:
            outcomes = list(pool.map(partial(_race, checkup, key, start), range(NUM_RACERS)))
        winners = [racer for racer, won in enumerate(outcomes) if won]
        if len(winners) != 1 or checkup.store.get(key) != _own(winners[0]):
            raise NotMet(f"{len(winners)} of {NUM_RACERS} writers created the same object", advice)
    return f"of {NUM_RACERS} writers exactly one created an object, {NUM_ROUNDS} times"


def _own(racer: int) -> bytes:
    return f"racer {racer}".encode() * 10


def _race(checkup: Checkup, key: str, start: threading.Barrier, racer: int) -> bool:
    start.wait(60)
    try:
        checkup.store.put_new(key, _own(racer))
    except ObjectExists:
        return False
    return True


def _overwrite(checkup: Checkup) -> str:
    key = checkup.key("hint")
    for content in (b"first", b"second"):
        checkup.store.put_hint(key, content)
        if checkup.store.get(key) != content:
            raise NotMet("an overwritten object reads as before", "Is a cache between this machine and the store?")
    return "a hint was overwritten and read back"


def _list(checkup: Checkup) -> str:
    begin_s = time.monotonic()
    keys = [checkup.key(f"listed-{number}") for number in range(3)]
    for key in keys:
        checkup.store.put_new(key, b"x")
    listed = [info.key for info in checkup.store.list(f"{checkup.folder}/")]
    missing = [key for key in keys if key not in listed]
    if missing:
        raise NotMet(
            f"{len(missing)} of {len(keys)} objects were not listed right after they were written",
            "Is this service eventually consistent? A stream needs listings that show what was written before",
        )
    return f"{len(keys)} objects were listed at once after {time.monotonic() - begin_s:.2f} s"


def _clock(checkup: Checkup) -> str:
    key = checkup.key("clock")
    before_s = time.time()
    checkup.store.put_new(key, b"x")
    after_s = time.time()
    modified_s = checkup.store.stat(key).modified_s
    if modified_s is None:
        return "this store keeps no times"
    skew_s = modified_s - (before_s + after_s) / 2
    checkup.measured.clock_skew_s = skew_s
    if abs(skew_s) > _MOST_SKEW_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        raise NotMet(
            f"the store's clock is {abs(skew_s):.0f} s {ahead} this machine's",
            "Set this machine's clock (NTP): clouds refuse requests that are 15 minutes off, and ages look wrong",
            is_needed=False,
        )
    return f"the store's clock differs by {abs(skew_s):.1f} s"


def _latency(checkup: Checkup) -> str:
    puts, gets, stats = [], [], []
    for number in range(NUM_SMALL):
        key, content = checkup.key(f"latency-{number}"), os.urandom(SMALL_BYTES)
        puts.append(_seconds(partial(checkup.store.put_new, key, content)))
        gets.append(_seconds(partial(checkup.store.get, key)))
        stats.append(_seconds(partial(checkup.store.stat, key)))
    checkup.measured.put_s, checkup.measured.get_s, checkup.measured.stat_s = map(
        statistics.median, (puts, gets, stats)
    )
    return (
        f"4 KiB: put {1e3 * statistics.median(puts):.1f} ms, get {1e3 * statistics.median(gets):.1f} ms, "
        f"poll {1e3 * statistics.median(stats):.1f} ms"
    )


def _throughput(checkup: Checkup) -> str:
    piece = os.urandom(_PIECE_BYTES)
    num_pieces = LARGE_BYTES // _PIECE_BYTES

    def pieces() -> Iterator[bytes]:
        for number in range(num_pieces):  # no two alike, so that nothing is left out on the way
            yield number.to_bytes(8, "little") + piece[8:]

    key = checkup.key(f"large-{secrets.token_hex(8)}")
    put_s = _seconds(lambda: checkup.store.put_new(key, pieces()))
    found: list[bytes] = []
    get_s = _seconds(lambda: found.append(checkup.store.get(key)))
    if found[0] != b"".join(pieces()):
        raise NotMet("a large object came back with other bytes", "Do not use this store: something changes objects")
    checkup.measured.put_bytes_per_s, checkup.measured.get_bytes_per_s = LARGE_BYTES / put_s, LARGE_BYTES / get_s
    mib = LARGE_BYTES / (1 << 20)
    return f"{mib:.0f} MiB: put {mib / put_s:.0f} MiB/s, get {mib / get_s:.0f} MiB/s"


def _delete(checkup: Checkup) -> str:
    key = f"{checkup.folder}/small"
    for _ in range(2):
        checkup.store.delete(key)
    deadline_s = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            checkup.store.stat(key)
        except ObjectNotFound:
            return "an object was deleted, and deleting it again did no harm"
        if time.monotonic() > deadline_s:
            raise NotMet(
                "a deleted object is still there", "Has the bucket a retention lock? Anchors and parts pile up"
            )


def _seconds(action: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    action()
    return time.perf_counter() - begin_s


_NEED_WRITING: Final = (
    ("create once", _create_once),
    ("overwrite", _overwrite),
    ("list", _list),
    ("clock", _clock),
    ("latency", _latency),
    ("throughput", _throughput),
    ("delete", _delete),
)
