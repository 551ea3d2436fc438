"""Reports: what happened to one version on one side, with bytes and seconds per phase. Frozen, and cheap to keep."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """One committed version, seen by one rank. Counts and bytes are of the whole version, over all ranks."""

    version: int
    num_changed: int
    """Elements whose bits the version sets, over all ranks."""
    num_elements: int
    """Elements of the whole state."""
    stored_bytes: int
    """Bytes of all parts in the store."""
    full_bytes: int
    """Bytes a full copy of the state would take."""
    num_parts: int
    num_steps: int
    """Optimizer steps of this rank that the version covers; 0 for sources without an optimizer."""
    step_s: float
    """Seconds capture spent inside those optimizer steps, this rank."""
    capture_s: float
    """Seconds the training thread spent collecting the changes, this rank."""
    back_pressure_s: float
    """Seconds the training thread waited because too many versions were in flight, this rank."""
    encode_s: float
    """Seconds of encoding, this rank's background threads together."""
    upload_s: float
    """Seconds of uploading and hashing, this rank's background threads together."""
    receipts_s: float
    """Seconds from the coordinator's start on this version until every rank's parts were uploaded."""
    commit_s: float
    """Seconds from there until the commit existed."""
    total_s: float
    """Seconds from the start of collecting until this rank knew of the commit."""
    info: dict[str, str] = field(default_factory=dict)
    """What the change source had to say (mode, tensors that moved outside the optimizer)."""

    @property
    def times_smaller(self) -> float:
        """Full copy over stored bytes; infinite for an empty version."""
        return self.full_bytes / self.stored_bytes if self.stored_bytes else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorReport:
    """One anchor written by all ranks together."""

    version: int
    manifest_key: str
    nonce: str
    """Tells it apart from other anchors of the version."""
    num_files: int
    stored_bytes: int
    staged_bytes: int
    """Bytes of shards this rank passed through the store to the owners of files; removed again."""
    copied_bytes: int = 0
    """Of `stored_bytes`, those taken over from the anchor before inside the store, without an upload."""
    stage_s: float
    """Seconds of staging them, this rank."""
    assemble_s: float
    """Seconds of assembling and uploading this rank's files."""
    snapshot_s: float = 0.0
    """Seconds training waited on this rank while its boxes were copied."""
    total_s: float
    """Seconds from the call until the anchor existed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionReport:
    """One pass of retention over a stream: what was deleted, or would be, and what is left."""

    dry_run: bool
    """Nothing was deleted; the other fields say what would have been."""
    holder: str | None = None
    """Who was deleting at the time, so that this pass did nothing; None if it ran."""
    floor: int | None = None
    """Version of the oldest anchor that stays; None if there are too few anchors to delete any version."""
    versions: tuple[int, ...] = ()
    """Whose commits and parts went."""
    anchors: tuple[int, ...] = ()
    """Whose full copies went."""
    num_orphans: int = 0
    """Parts and files that nothing named."""
    num_expired_leases: int = 0
    num_live_leases: int = 0
    """Readers that hold something back, or could."""
    forks: tuple[str, ...] = ()
    """Roots beside the stream where a writer that was killed had begun to fork it; what lay there went."""
    num_temporary: int = 0
    """Temporary files of dead writers; 0 in a dry run, which does not look for them."""
    freed_bytes: int = 0
    kept_bytes: int = 0
    """Of parts, anchors and leases that are left."""
    budget_bytes: int | None = None
    """What the stream should take at most; only compared, never enforced at a reader's expense."""
    failures: tuple[str, ...] = ()
    """What could not be deleted; tried again the next time."""
    seconds: float = 0.0

    @property
    def over_budget_bytes(self) -> int:
        """By how much the stream is larger than its budget."""
        return 0 if self.budget_bytes is None else max(self.kept_bytes - self.budget_bytes, 0)
