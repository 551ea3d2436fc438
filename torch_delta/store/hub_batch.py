"""Writes that arrive together travel together: one batch request at a time, with all that waited for the last one.

Rank 0 publishes several parts at once from as many threads; each waits here for its own entry's outcome.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch_delta.store.calls import Answer
from torch_delta.store.hub_replies import HubTrouble

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.store.hub_http import HubClient
    from torch_delta.store.hub_xet import Content

_MOST_OPERATIONS: Final = 500


@dataclass(eq=False, slots=True)
class _Ticket:
    """One operation that waits."""

    operation: Mapping[str, Any]
    woken: threading.Event = field(default_factory=threading.Event)
    must_lead: bool = False
    trouble: HubTrouble | None = None
    failure: str | None = None


class Batcher:
    """Thread-safe.

    Args:
        client: sends the batches.
        request_timeout_s: longest time of one batch, seconds.
    """

    def __init__(self, client: HubClient, request_timeout_s: float) -> None:
        self._client = client
        self._request_timeout_s = request_timeout_s
        self._lock = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._is_busy = False

    def add(self, path: str, content: Content) -> str | None:
        """Give stored content a name, taking it away from what had it.

        Returns:
            Why the Hub did not do it although it answered (F76), or None.

        Raises:
            HubTrouble: no clear answer; it may have happened.
        """
        now_ms = int(time.time() * 1000)  # for people who look at the bucket; nothing here reads it
        return self._run({"type": "addFile", "path": path, "xetHash": content.hash, "mtime": now_ms})

    def delete(self, path: str) -> str | None:
        """Take a name away; returns and raises as `add`."""
        return self._run({"type": "deleteFile", "path": path})

    def _run(self, operation: Mapping[str, Any]) -> str | None:
        ticket = _Ticket(operation)
        with self._lock:
            self._waiting.append(ticket)
            if not self._is_busy:
                self._is_busy = ticket.must_lead = True
        # Whoever leads hands over after its own batch, so this is two batches' time: the one under way and ours.
        if not ticket.must_lead and not ticket.woken.wait(3 * self._request_timeout_s):
            raise HubTrouble(Answer("unclear", "the batch it was in had no answer", "Repeat", None))
        if ticket.must_lead:
            self._lead()
        if ticket.trouble is not None:
            raise ticket.trouble
        return ticket.failure

    def _lead(self) -> None:
        """Send what waits, the leader's own operation among it, then wake the next leader."""
        with self._lock:
            batch, self._waiting = self._waiting[:_MOST_OPERATIONS], self._waiting[_MOST_OPERATIONS:]
        try:
            failures = self._client.batch([ticket.operation for ticket in batch])
            for ticket in batch:
                ticket.failure = failures.get(ticket.operation["path"])
        except HubTrouble as trouble:
            for ticket in batch:
                ticket.trouble = trouble
        finally:
            with self._lock:
                following = self._waiting[0] if self._waiting else None
                self._is_busy = following is not None
                if following is not None:
                    following.must_lead = True
            for ticket in [*batch, *([following] if following is not None else [])]:
                ticket.woken.set()
