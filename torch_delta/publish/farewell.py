"""The end of a publisher: rank 0 leaves last, because the key-value store often goes with its process."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from torch_delta.errors import DeadlineExceeded
from torch_delta.publish.keyvalue import await_value

if TYPE_CHECKING:
    from torch_delta.publish.coordination import Team

_logger = logging.getLogger("torch_delta")


def say_farewell(team: Team, timeout_s: float) -> None:
    """Say that this rank has heard everything; on rank 0, wait for all other ranks together to say so.

    A rank that does not is logged and no error.

    Args:
        team: this rank's.
        timeout_s: for all of them.
    """
    kv, rank = team.kv, team.rank
    if not team.is_coordinator:
        kv.set(f"closed/{rank}", b"\0" * 8)
        return
    deadline = time.monotonic() + timeout_s
    for other in range(1, team.world_size):
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            await_value(kv, f"closed/{other}", timeout_s=left_s, phase="close", peer=f"rank {other}")
        except DeadlineExceeded as error:
            _logger.warning("%s", error)
