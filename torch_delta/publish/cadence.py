"""When an anchor is due: what a late receiver would save by one (F104)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.config import PublishConfig
    from torch_delta.publish.records import Committed


class Cadence:
    """The chain since the newest anchor, as a receiver sees it; the coordinator's. Any thread.

    A receiver that takes the deltas downloads `stored_bytes` and decodes `num_changed` elements; one that takes the
    anchor downloads it. An anchor is due when the first costs more than `anchor_share` of the second, by the speeds
    that the configuration assumes of receivers, and enough seconds to care.

    Args:
        config: of the publisher.
        full_bytes: of an anchor.
    """

    def __init__(self, config: PublishConfig, full_bytes: int) -> None:
        self._config = config
        self._anchor_s = full_bytes / config.receiver_bytes_per_s
        self._costs_s: dict[int, float] = {}
        self._asked = False
        self._lock = threading.Lock()

    def note(self, outcome: Committed) -> bool:
        """A version was committed; whether an anchor is due now. Says so once, until `written` or `failed`."""
        if self._config.anchor_share is None:
            return False
        limit_s = max(self._config.anchor_share * self._anchor_s, self._config.anchor_least_s)
        with self._lock:
            self._costs_s[outcome.version] = (
                outcome.stored_bytes / self._config.receiver_bytes_per_s
                + outcome.num_changed / self._config.receiver_elements_per_s
            )
            if self._asked or sum(self._costs_s.values()) <= limit_s:
                return False
            self._asked = True
            return True

    def written(self, version: int) -> None:
        """An anchor of this version exists; what came before it is no longer replayed."""
        with self._lock:
            self._costs_s = {at: cost_s for at, cost_s in self._costs_s.items() if at > version}
            self._asked = False

    def failed(self) -> None:
        """The anchor that was asked for was not written: ask again."""
        self._asked = False
