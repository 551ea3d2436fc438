"""Telling all ranks what became of the versions, in order, and tidying the key-value store behind it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch_delta.errors import DeadlineExceeded
from torch_delta.publish.keyvalue import forget_blob, put_blob
from torch_delta.publish.pipeline import receipt_key
from torch_delta.publish.progress import outcome_key

if TYPE_CHECKING:
    from torch_delta.publish.coordination import Team

_logger = logging.getLogger("torch_delta")


class Announcer:
    """The outcomes of one publisher, as one sequence. Used by the coordinator's thread alone.

    Args:
        team: rank 0's view of the ranks.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._num_told = 0
        self._num_deleted = 0
        self._untold: list[bytes] = []
        self._leftovers: list[tuple[int, int]] = []

    def tell(self, outcome: bytes) -> None:
        """Tell all ranks; what cannot be told now is told before the next one, never replaced by another."""
        self._untold.append(outcome)
        while self._untold:
            try:
                put_blob(self._team.kv, outcome_key(self._num_told), self._untold[0])
            except DeadlineExceeded:
                # The key-value store is gone, and with it the way to tell anybody; all ranks meet the same.
                _logger.exception("the coordinator could not announce outcome %d", self._num_told)
                return
            del self._untold[0]
            self._num_told += 1

    def forget_heard(self, heard_by_all: int) -> None:
        """Delete the outcomes that every rank has heard."""
        for number in range(self._num_deleted, heard_by_all):
            self._team.kv.delete(outcome_key(number))
        self._num_deleted = max(self._num_deleted, heard_by_all)

    def leave(self, epoch: int, versions: range) -> None:
        """Note versions that were aborted, for which ranks may still set receipts."""
        self._leftovers += [(epoch, version) for version in versions]

    def forget_leftovers(self) -> None:
        """Delete such receipts. A version has been committed since: no rank sets one any more."""
        leftovers, self._leftovers = self._leftovers, []
        for epoch, version in leftovers:
            for rank in range(self._team.world_size):
                try:
                    forget_blob(self._team.kv, receipt_key(epoch, version, rank))
                except DeadlineExceeded:
                    return
