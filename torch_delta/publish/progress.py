"""What rank 0's two threads share: how many steps there were, where the stream stands, what is to be committed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.stream.stream import Stream


class StepClock:
    """Counts optimizer steps on the training thread; the coordinator can hold it still.

    Ranks in lock-step are at most one step apart, because every step needs all of them. While the coordinator's count
    stands at s no rank can be past s + 1, so a record written now that names step s + 2 reaches every rank before it
    counts that step.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.is_stepped = False
        """Whether optimizer steps drive it; otherwise every `publish` counts as one."""

    def advance(self) -> int:
        """One more step; waits while an abort is being written."""
        with self.lock:
            self.count += 1
            return self.count


@dataclass(slots=True)
class Lineage:
    """Where the stream stands; the coordinator's, moved only by a commit."""

    stream: Stream
    stream_id: str
    schema: Schema
    version: int
    parent_sha256: str
    """Of the stored bytes of the commit of `version`, or of stream.json at version 0."""
    digests: list[Digest]
    """Of every data tensor, in the order of `Schema.data_indices`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A version that rank 0 has collected, for the coordinator to complete."""

    version: int
    epoch: int
    step: int
    """The clock when it was collected."""
    is_flush: bool = False
    """Only settle the pending commit; there is nothing new."""


def outcome_key(number: int) -> str:
    """Outcomes form one sequence per publisher, read in order by every rank."""
    return f"outcome/{number}"
