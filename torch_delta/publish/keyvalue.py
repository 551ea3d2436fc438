"""Small values shared by the ranks of a job, and waiting for one with a deadline: torch's store, or a plain dict."""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING, Protocol

from torch_delta.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

# TCPStore refuses values above 8 MiB and drops the connection; stay well below.
_CHUNK_BYTES = 1 << 20
_MAX_BLOB_BYTES = 1 << 30
_HEADER = struct.Struct("<Q")  # total bytes of a blob, in front of its first chunk
_FIRST_POLL_S = 0.0005
_LONGEST_POLL_S = 0.02
_POLL_SHARE = 0.05  # of the time waited so far, so that polling lengthens no wait by much


class KeyValue(Protocol):
    """A small shared map. Every method may be called from any thread; all but `pause` return at once."""

    def set(self, key: str, value: bytes) -> None:
        """Set a value of at most a few MiB; visible to every rank when this returns."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value, or None if nobody has set it yet. Never waits for it."""
        ...

    def delete(self, key: str) -> None:
        """Forget a key; one that is not there is no error."""
        ...

    def pause(self, key: str, *, waited_s: float, left_s: float) -> None:
        """Let time pass between two looks at a key that is not set yet.

        Args:
            key: that is waited for; the pause may end as soon as it is set.
            waited_s: seconds that went by since the first look.
            left_s: the longest that it may take, seconds.
        """
        ...


class LocalKeyValue:
    """The map of a single process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._is_set = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """See `KeyValue.set`."""
        with self._is_set:
            self._values[key] = value
            self._is_set.notify_all()

    def get(self, key: str) -> bytes | None:
        """See `KeyValue.get`."""
        return self._values.get(key)

    def delete(self, key: str) -> None:
        """See `KeyValue.delete`."""
        self._values.pop(key, None)

    def pause(self, key: str, *, waited_s: float, left_s: float) -> None:  # noqa: ARG002  needs no guess
        """See `KeyValue.pause`. Ends when the key is set: no thread of this process looks in vain."""
        with self._is_set:
            self._is_set.wait_for(lambda: key in self._values, min(left_s, _LONGEST_POLL_S))


class PrefixedKeyValue:
    """A part of another map.

    Args:
        inner: the map.
        prefix: of every key.
    """

    def __init__(self, inner: KeyValue, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """See `KeyValue.set`."""
        self._inner.set(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        """See `KeyValue.get`."""
        return self._inner.get(self._prefix + key)

    def delete(self, key: str) -> None:
        """See `KeyValue.delete`."""
        self._inner.delete(self._prefix + key)

    def pause(self, key: str, *, waited_s: float, left_s: float) -> None:
        """See `KeyValue.pause`."""
        self._inner.pause(self._prefix + key, waited_s=waited_s, left_s=left_s)


class TorchKeyValue:
    """The key-value store of torch.distributed, under a prefix of our own.

    A connection serves one call at a time, and torch keeps its own busy inside its waits; ours is a clone with a
    connection of its own, on which no call waits for a key, so that all our threads can share it.

    Args:
        store: the store behind the process group.
        prefix: unique to one attached publisher.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._original = store  # may be the server itself, which ends with its last reference
        self._store: Store = PrefixStore(prefix, store).clone()  # type: ignore[attr-defined]

    def set(self, key: str, value: bytes) -> None:
        """See `KeyValue.set`."""
        with _unreachable("set", key):
            # The stub says str; bytes are what the binding takes and what `get` returns.
            self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """See `KeyValue.get`."""
        with _unreachable("get", key):
            return bytes(self._store.get(key)) if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        """See `KeyValue.delete`."""
        with _unreachable("delete", key):
            self._store.delete_key(key)

    def pause(self, key: str, *, waited_s: float, left_s: float) -> None:  # noqa: ARG002  cannot be woken
        """See `KeyValue.pause`. Asleep: a wait inside torch's store would keep the connection from every other call."""
        time.sleep(min(max(_FIRST_POLL_S, _POLL_SHARE * waited_s), _LONGEST_POLL_S, left_s))


class _unreachable:  # noqa: N801 - reads as a phrase at the call
    """Turns the store's RuntimeErrors (server gone with its rank, connection reset) into one of ours."""

    def __init__(self, operation: str, key: str) -> None:
        self._operation, self._key = operation, key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise DeadlineExceeded(
                f"the process group's key-value store does not answer ({self._operation} {self._key}): {error}; the "
                "process that serves it, usually rank 0 or the launcher, is gone",
                phase="key-value store",
                peer="server",
                timeout_s=0.0,
            ) from error


def await_value(
    kv: KeyValue,
    key: str,
    *,
    timeout_s: float,
    phase: str,
    peer: str,
    is_stopped: Callable[[], bool] = lambda: False,
) -> bytes:
    """Wait until a blob is there and read it.

    Args:
        kv: where.
        key: as given to `put_blob`.
        timeout_s: seconds; at least one look is taken.
        phase: what is being waited for, for the error.
        peer: who should set it, for the error.
        is_stopped: ends the wait early, as if the deadline had passed.

    Raises:
        DeadlineExceeded: nobody set it in time.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    while True:
        value = get_blob(kv, key)
        if value is not None:
            return value
        now = time.monotonic()
        left_s = deadline - now
        if left_s <= 0 or is_stopped():
            raise DeadlineExceeded(
                f"{phase}: nothing heard from {peer} within {timeout_s:g} s; look at that process's log, or raise the "
                "timeout if it is only slow",
                phase=phase,
                peer=peer,
                timeout_s=timeout_s,
            )
        kv.pause(key, waited_s=now - started, left_s=left_s)


def put_blob(kv: KeyValue, key: str, data: bytes) -> None:
    """Set a value of any size up to 1 GiB: further chunks first, the one under `key` last."""
    if len(data) > _MAX_BLOB_BYTES:
        raise ValueError(f"{key}: {len(data)} bytes are too many for the key-value store, at most {_MAX_BLOB_BYTES}")
    for number, start in enumerate(range(_CHUNK_BYTES, len(data), _CHUNK_BYTES), start=1):
        kv.set(f"{key}.{number}", data[start : start + _CHUNK_BYTES])
    kv.set(key, _HEADER.pack(len(data)) + data[:_CHUNK_BYTES])


def get_blob(kv: KeyValue, key: str) -> bytes | None:
    """Read what `put_blob` set, or None if it is not there yet."""
    first = kv.get(key)
    if first is None:
        return None
    (total,) = _HEADER.unpack_from(first)
    pieces = [first[_HEADER.size :]]
    for number in range(1, -(-total // _CHUNK_BYTES)):
        piece = kv.get(f"{key}.{number}")
        assert piece is not None, f"{key}.{number} is set before {key}"
        pieces.append(piece)
    return b"".join(pieces)


def forget_blob(kv: KeyValue, key: str) -> None:
    """Forget a blob of unknown size, if it is there."""
    first = kv.get(key)
    if first is not None:
        delete_blob(kv, key, _HEADER.unpack_from(first)[0])


def delete_blob(kv: KeyValue, key: str, size_bytes: int) -> None:
    """Forget a blob of `size_bytes`."""
    for number in range(1, -(-size_bytes // _CHUNK_BYTES)):
        kv.delete(f"{key}.{number}")
    kv.delete(key)
