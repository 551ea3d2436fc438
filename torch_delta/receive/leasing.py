"""A reader's lease: what retention must leave alone for as long as this follower lives (rule L2)."""

from __future__ import annotations

import logging
import os
import platform
import threading
from typing import TYPE_CHECKING

from torch_delta.errors import StoreError
from torch_delta.format.keys import new_nonce
from torch_delta.format.lease import Lease
from torch_delta.format.limits import MAX_LEASE_SECONDS

if TYPE_CHECKING:
    from torch_delta.stream import Stream

logger = logging.getLogger("torch_delta")

_RENEWALS = 3  # in the life of a lease, so that one of them may fail


class LeaseKeeper:
    """Writes one lease and keeps it alive.

    `hold` is called by the thread that follows; a thread of its own renews what was held last, since a step can take
    longer than a lease lives.

    Args:
        stream: to hold back the retention of.
        seconds: the lease lives for if it is not renewed; a dead follower holds nothing for longer.

    Raises:
        ValueError: not a number of seconds a lease may have.
    """

    def __init__(self, stream: Stream, seconds: int) -> None:
        if not 1 <= seconds <= MAX_LEASE_SECONDS:
            raise ValueError(f"lease_s is {seconds}; expected 1 to {MAX_LEASE_SECONDS} seconds")
        self._stream = stream
        self._seconds = seconds
        self._nonce = new_nonce()
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, version: int, anchor: str | None) -> None:
        """Ask that all after `version` stays, and the anchor with this manifest key; written before this returns.

        Raises:
            StoreUnavailable: it could not be written; without permission to write there can be no lease.
        """
        lease = Lease(
            nonce=self._nonce,
            stream_id=self._stream.load()[0].stream_id,
            version=version,
            anchor=anchor,
            seconds=self._seconds,
            info={"host": platform.node()[:255], "pid": str(os.getpid())},
        )
        with self._lock:
            if lease == self._lease:
                return  # it is being renewed
            self._stream.store.put_hint(lease.key, lease.to_bytes())
            self._lease = lease
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._renew, name="torch-delta-lease", daemon=True)
                self._thread.start()

    def _renew(self) -> None:
        while not self._closing.wait(self._seconds / _RENEWALS):
            with self._lock:
                lease = self._lease
                if lease is None or self._closing.is_set():
                    return
                try:
                    self._stream.store.put_hint(lease.key, lease.to_bytes())
                except StoreError as error:
                    logger.warning("the lease of this reader was not renewed, trying again: %s", error)

    def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            lease, self._lease = self._lease, None
            if lease is not None:
                try:
                    self._stream.store.delete(lease.key)
                except StoreError as error:
                    logger.warning("the lease of this reader was not deleted, it runs out by itself: %s", error)
