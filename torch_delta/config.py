"""What a user may choose about publishing: one frozen dataclass, checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

SnapshotMode = Literal["auto", "transient", "persistent"]
"""Where the previous bits live; the formulas for their bytes are with the capture modes."""

_ENCODINGS = ("coo", "xor", "dense")
_ABSOLUTE_ENCODINGS = frozenset({"coo", "dense"})
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """How a Publisher captures, encodes, uploads and commits. The same on every rank.

    Raises:
        ValueError: a field or a combination of fields that cannot work, named.
    """

    every: int | None = 1
    """Optimizer steps between two automatic versions; None publishes only when `Publisher.publish` is called."""
    mode: SnapshotMode = "auto"
    """Where capture keeps the previous bits between two versions."""
    max_in_flight: int = 2
    """Versions that may be collected and not yet committed; one more waits (back-pressure) inside `publish`."""
    receipt_timeout_s: float = 600.0
    """Seconds the coordinator waits for every rank to have encoded and uploaded its part of a version."""
    commit_timeout_s: float = 120.0
    """Seconds the coordinator repeats a commit whose outcome the store does not tell."""
    wait_timeout_s: float = 900.0
    """Seconds `wait`, `close` and back-pressure wait for the coordinator's decision on one version."""
    attach_timeout_s: float = 1800.0
    """Seconds a rank waits for the others in each phase of attaching and of writing an anchor."""
    encodings: tuple[str, ...] = _ENCODINGS
    """Encodings the writer may pick from, per slice, by measured size."""
    absolute_only: bool = False
    """Declare the stream free of relative encodings, so that receivers need no copy of the checkpoint."""
    zstd_level: int = 1
    """Compression level of `xor` payloads, 1 (fast) to 19 (small)."""
    num_encode_threads: int = 2
    """Threads per rank that encode and upload one version."""
    part_bytes: int = 256 * _MIB
    """Changed bytes (indices and values, before compression) after which a rank starts another part."""
    num_put_attempts: int = 3
    """How often the upload of a part is tried before the version fails."""
    retry_delay_s: float = 0.5
    """Seconds before the second attempt of an upload or a commit; doubles for each further one, up to 10 s."""
    anchor_every: int | None = None
    """Versions between two anchors; None writes anchors only on request."""
    anchor_file_bytes: int = 5_000_000_000
    """Size after which an anchor starts another weight file; a larger tensor gets a file of its own."""
    max_reports: int = 1000
    """Reports kept for `Publisher.wait` and `Publisher.reports`; older ones are dropped."""

    def __post_init__(self) -> None:
        """Check every field and every pair of fields that depend on each other."""
        self._check_counts()
        if self.mode not in get_args(SnapshotMode):
            raise ValueError(f"mode is {self.mode!r}; expected one of {', '.join(get_args(SnapshotMode))}")
        self._check_encodings()
        for name in ("receipt_timeout_s", "commit_timeout_s", "wait_timeout_s", "attach_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected seconds above 0")
        if self.retry_delay_s < 0:
            raise ValueError(f"retry_delay_s is {self.retry_delay_s}; expected 0 or more seconds")
        if self.wait_timeout_s < self.receipt_timeout_s + self.commit_timeout_s:
            raise ValueError(
                f"wait_timeout_s is {self.wait_timeout_s}, less than receipt_timeout_s + commit_timeout_s = "
                f"{self.receipt_timeout_s + self.commit_timeout_s}: a rank would give up on a version before the "
                "coordinator does; raise wait_timeout_s or lower the other two"
            )

    def _check_counts(self) -> None:
        for name, smallest in (
            ("every", 1),
            ("max_in_flight", 1),
            ("num_encode_threads", 1),
            ("part_bytes", _MIB),
            ("num_put_attempts", 1),
            ("anchor_every", 1),
            ("anchor_file_bytes", 1),
            ("max_reports", 1),
        ):
            value = getattr(self, name)
            if value is None and name in {"every", "anchor_every"}:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ValueError(f"{name} is {value!r}; expected an integer of at least {smallest}")
        if not 1 <= self.zstd_level <= 19:
            raise ValueError(f"zstd_level is {self.zstd_level}; expected 1 to 19")

    def _check_encodings(self) -> None:
        unknown = [name for name in self.encodings if name not in _ENCODINGS]
        if unknown or len(set(self.encodings)) != len(self.encodings):
            raise ValueError(f"encodings are {self.encodings!r}; expected distinct ones of {', '.join(_ENCODINGS)}")
        if not _ABSOLUTE_ENCODINGS.intersection(self.encodings):
            # Weights that moved outside the optimizer are re-sent without knowing their old bits.
            raise ValueError(
                f"encodings are {self.encodings!r}; at least one of {', '.join(sorted(_ABSOLUTE_ENCODINGS))} is needed"
            )

    @property
    def usable_encodings(self) -> tuple[str, ...]:
        """The encodings left when `absolute_only` has taken the relative ones away."""
        return tuple(e for e in self.encodings if not self.absolute_only or e in _ABSOLUTE_ENCODINGS)
