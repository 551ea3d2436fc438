"""Which versions get an anchor: by number, on request, or because the coordinator found one due. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.config import PublishConfig


class AnchorTurns:
    """The same answer for a version on every rank; used by each rank's training thread alone.

    An anchor that the coordinator found due is told with an outcome, which ranks hear at different moments. It is taken
    `max_in_flight` versions later, by when all have heard.

    Args:
        config: of the publisher.
    """

    def __init__(self, config: PublishConfig) -> None:
        self._config = config
        self._is_wanted = False
        self._due_from: int | None = None
        self._taken = 0  # the newest version that got one

    def want(self) -> None:
        """Let the next version have one."""
        self._is_wanted = True

    def hear_due(self, version: int) -> None:
        """The outcome of `version` said that one is due."""
        self._due_from = version + self._config.max_in_flight

    def takes(self, version: int) -> bool:
        """Whether this version gets one; asked once for each that is collected."""
        every = self._config.anchor_every
        by_number = every is not None and version % every == 0
        is_due = self._due_from is not None and version >= self._due_from
        if is_due:
            self._due_from = None
        wanted, self._is_wanted = self._is_wanted, False
        takes = by_number or is_due or wanted
        if takes:
            self._taken = version
        return takes

    def lose(self, next_version: int) -> None:
        """Versions from this one on were lost, and an anchor with its version; the next version gets it."""
        if self._taken >= next_version:
            self._is_wanted = True
            self._taken = 0
