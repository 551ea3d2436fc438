"""A store that fails when and how a script says, and counts what it was asked.

    store = FaultyStore(inner, [
        Fault("put_new", "parts/*", nth=2, effect=fail_after()),          # stored, but the reply is lost
        Fault("get", "commits/*", effect=flip_bit(byte=17)),              # damaged on the way
        Fault("stat", "commits/*", effect=call(gate.wait)),               # slow, for as long as the test wants
    ])
    ...
    store.assert_fired()                                                  # or the test did not test what it says

Nothing is random and nothing sleeps: a fault fires at the nth matching call, and a delay is whatever the callback waits
for.
"""

from __future__ import annotations

import fnmatch
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from torch_delta.errors import StoreUnavailable
from torch_delta.store.base import BytesLike, Data, ObjectInfo, Store, views

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

Operation = Literal[
    "get", "get_range", "stat", "open_local", "list", "put_new", "copy", "put_hint", "delete", "sweep_temporary", "*"
]


class Crash(BaseException):
    """Stands for the death of the process: no `except Exception` may survive it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What a fault does; made by the functions below."""

    before: Callable[[], object] | None = None
    """Runs before the inner store is asked; what it raises replaces the call."""
    after: Callable[[], object] | None = None
    """Runs after the inner store did its work; what it raises replaces the answer."""
    change: Callable[[bytes], bytes] | None = None
    """Changes the bytes that `get` or `get_range` hands out."""
    cut_after_bytes: int | None = None
    """For `put_new`: the data ends in an error after this many bytes."""


def fail_before(error: BaseException | None = None) -> Effect:
    """The operation does not happen; by default `StoreUnavailable` with ``outcome="absent"``."""
    return Effect(before=_raiser(error, "absent"))


def fail_after(error: BaseException | None = None) -> Effect:
    """The operation happens, its reply is lost; by default `StoreUnavailable` with ``outcome="unknown"``."""
    return Effect(after=_raiser(error, "unknown"))


def crash_before() -> Effect:
    """The caller dies before the operation."""
    return Effect(before=_raiser(Crash("before the operation"), ""))


def crash_after() -> Effect:
    """The caller dies after the operation, before it learns of its success."""
    return Effect(after=_raiser(Crash("after the operation"), ""))


def call(callback: Callable[[], object], *, after: bool = False) -> Effect:
    """Run a callback before (or after) the operation: wait for an event, change the store behind the caller's back."""
    return Effect(after=callback) if after else Effect(before=callback)


def flip_bit(*, byte: int, bit: int = 0) -> Effect:
    """Flip one bit of what is read; a negative `byte` counts from the end."""

    def flip(data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[byte] ^= 1 << bit
        return bytes(damaged)

    return Effect(change=flip)


def truncate(num_bytes: int) -> Effect:
    """Hand out only the first `num_bytes` of what is read."""
    return Effect(change=lambda data: data[:num_bytes])


def cut(after_bytes: int) -> Effect:
    """A put breaks off after so many bytes, as when its source dies."""
    return Effect(cut_after_bytes=after_bytes)


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the script."""

    operation: Operation
    """The method, or ``"*"`` for all."""
    key: str = "*"
    """Shell pattern for the key; for `list` it is matched with the prefix."""
    effect: Effect = field(default_factory=fail_before, kw_only=True)
    """What happens."""
    nth: int = field(default=1, kw_only=True)
    """The first matching call that it hits, counted from 1."""
    times: int | None = field(default=1, kw_only=True)
    """How many matching calls in a row it hits; None for all that follow."""

    def __post_init__(self) -> None:
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise ValueError(f"nth and times count from 1, got {self.nth} and {self.times}")


class FaultyStore(Store):
    """Passes every call on to `inner`, except where the script says otherwise. Thread-safe.

    Args:
        inner: the store that does the work; its state is open to the test.
        script: faults; several may hit one call, they act in this order.

    Attributes:
        inner: as given.
        calls: how often each operation was asked for, failed calls included.
    """

    def __init__(self, inner: Store, script: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self._script = list(script)
        self._matched: list[int] = [0] * len(self._script)
        self._fired: list[int] = [0] * len(self._script)
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Extend the script; matching calls are counted from now."""
        with self._lock:
            self._script.append(fault)
            self._matched.append(0)
            self._fired.append(0)

    def fired(self) -> tuple[int, ...]:
        """How often each fault has fired, in the order of the script."""
        with self._lock:
            return tuple(self._fired)

    def assert_fired(self) -> None:
        """Every fault fired as often as it should: `times`, or at least once if that is None.

        Raises:
            AssertionError: one did not; the message names it.
        """
        with self._lock:
            for fault, fired in zip(self._script, self._fired, strict=True):
                if fired != fault.times if fault.times is not None else fired == 0:
                    raise AssertionError(f"{fault} fired {fired} times; calls were {dict(self.calls)}")

    @property
    def url(self) -> str:
        """The inner store's."""
        return self.inner.url

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Faults: all but `cut`."""
        return self._run("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Faults: all but `cut`."""
        return self._run("get_range", key, lambda: self.inner.get_range(key, start, length))

    def stat(self, key: str) -> ObjectInfo:
        """Faults: before and after."""
        return self._run("stat", key, lambda: self.inner.stat(key))

    def open_local(self, key: str) -> Path | None:
        """Faults: before and after. None while the script damages reads, so that readers come through `get`."""
        path = self._run("open_local", key, lambda: self.inner.open_local(key))
        damages = any(fault.effect.change is not None for fault in self._script)
        return None if damages else path

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Faults: before and after; the inner listing is read in full when called."""
        found = self._run("list", prefix, lambda: [*self.inner.list(prefix, start_after=start_after)])
        return iter(found)

    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """Faults: before, after and `cut`."""
        effects = self._hits("put_new", key)
        for effect in effects:
            if effect.cut_after_bytes is not None:
                data = _cut(data, effect.cut_after_bytes)
        return _apply(effects, lambda: self.inner.put_new(key, data))

    def copy(self, source: str, key: str) -> ObjectInfo | None:
        """Faults: before and after; matched by the new name."""
        return self._run("copy", key, lambda: self.inner.copy(source, key))

    def sibling(self, root: str) -> Store:
        """The inner store's, without faults."""
        return self.inner.sibling(root)

    def put_hint(self, key: str, data: BytesLike) -> None:
        """Faults: before and after."""
        self._run("put_hint", key, lambda: self.inner.put_hint(key, data))

    def delete(self, key: str) -> None:
        """Faults: before and after."""
        self._run("delete", key, lambda: self.inner.delete(key))

    def sweep_temporary(self, *, older_than_s: float) -> int:
        """Faults: before and after; the key is empty."""
        return self._run("sweep_temporary", "", lambda: self.inner.sweep_temporary(older_than_s=older_than_s))

    def close(self) -> None:
        """Leave the inner store open: the test owns it."""

    def _make_durable(self, key: str) -> None:
        self.inner._make_durable(key)

    def _run(self, operation: Operation, key: str, action: Callable[[], T]) -> T:
        return _apply(self._hits(operation, key), action)

    def _hits(self, operation: Operation, key: str) -> Sequence[Effect]:
        hits = []
        with self._lock:
            self.calls[operation] += 1
            for index, fault in enumerate(self._script):
                if fault.operation in {"*", operation} and fnmatch.fnmatchcase(key, fault.key):
                    self._matched[index] += 1
                    since = self._matched[index] - fault.nth
                    if since >= 0 and (fault.times is None or since < fault.times):
                        self._fired[index] += 1
                        hits.append(fault.effect)
        return hits


def _apply(effects: Sequence[Effect], action: Callable[[], T]) -> T:
    for effect in effects:
        if effect.before is not None:
            effect.before()
    answer = action()
    for effect in effects:
        if effect.change is not None and isinstance(answer, bytes):
            answer = cast("T", effect.change(answer))
        if effect.after is not None:
            effect.after()
    return answer


def _cut(data: Data, after_bytes: int) -> Iterator[memoryview]:
    left = after_bytes
    for view in views(data):
        yield view[:left]
        left -= min(left, len(view))
        if left == 0:
            break
    raise ConnectionError(f"the data broke off after {after_bytes - left} bytes")


def _raiser(error: BaseException | None, outcome: str) -> Callable[[], None]:
    def fail() -> None:
        if error is not None:
            raise error
        raise StoreUnavailable("a scripted fault", outcome=outcome, operation="scripted")

    return fail
