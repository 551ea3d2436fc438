"""What a follower says about each step it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyReport:
    """A local checkpoint reached a version, proved by digests."""

    version: int
    """The version it is at now."""
    from_version: int | None
    """The version it was at before; None if it held nothing that was usable."""
    kind: Literal["delta", "anchor", "successor", "shared"]
    """Deltas applied (one, or several at once), an anchor loaded, the same bits now version 0 of the stream that goes
    on (nothing was fetched), or another process of this host did it (then bytes and seconds are 0)."""
    num_changed: int
    """Elements the step set; all elements for an anchor."""
    stored_bytes: int
    """Fetched from the store."""
    full_bytes: int
    """A full copy of the state."""
    fetch_s: float
    """Seconds until every object was here and its sha256 was checked."""
    decode_s: float
    """Seconds of parsing, checking and decoding to absolute values, proofs of every slice included."""
    verify_s: float
    """Seconds of digests of whole tensors: at a process's first write to a checkpoint, and for anchors."""
    apply_s: float
    """Seconds of journalling and writing; readers were kept out for a part of it."""
    wait_s: float
    """Seconds spent waiting for another process of this host."""
    stream_id: str = ""
    """The stream whose version this is. Where it differs from the report before, the checkpoint went over to a
    successor, whose versions begin at 0 again."""

    @property
    def total_s(self) -> float:
        """All phases."""
        return self.fetch_s + self.decode_s + self.verify_s + self.apply_s + self.wait_s

    @property
    def times_smaller(self) -> float:
        """Full copy over fetched bytes; infinite when nothing was fetched."""
        return self.full_bytes / self.stored_bytes if self.stored_bytes else float("inf")


def shared(before: int, now: int, stream_id: str) -> ApplyReport:
    """The report when another process of this host did the work."""
    return ApplyReport(
        version=now,
        from_version=before,
        kind="shared",
        num_changed=0,
        stored_bytes=0,
        full_bytes=0,
        fetch_s=0.0,
        decode_s=0.0,
        verify_s=0.0,
        apply_s=0.0,
        wait_s=0.0,
        stream_id=stream_id,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What `LocalCheckpoint.verify` looked at, all of it right."""

    version: int
    """Of the checkpoint."""
    num_tensors: int
    """That were checked."""
    size_bytes: int
    """That were read and digested; 0 for a quick check."""
    seconds: float
    """It took."""
