"""What a user may choose about publishing: one frozen dataclass, checked when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

OnRestart = Literal["fork", "refuse", "takeover"]
"""What a trainer does whose weights are not those at the end of the stream it attaches to, or that finds it in use."""
SnapshotMode = Literal["auto", "transient", "persistent"]
"""Where the previous bits live; the formulas for their bytes are with the capture modes."""

Profile = Literal["auto", "small", "fast"]
"""How `packed` codes positions; see `PublishConfig.profile`."""

_ENCODINGS = ("coo", "packed", "xor", "dense")
_ABSOLUTE_ENCODINGS = frozenset({"coo", "dense"})
_MIB = 1 << 20
_MAX_CLAIM_S = 604_800  # rule L4 of the format


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig:
    """What of a stream stays when room is made.

    Raises:
        ValueError: a field that cannot work, named.
    """

    keep_anchors: int = 2
    """Newest complete anchors that stay, with every version after the oldest of them; at least 2."""
    grace_s: float = 86_400.0
    """Seconds after which a part or file that nothing names is garbage; a writer must not take longer for a version."""
    claim_s: int = 3600
    """Seconds other deleters keep away if this one dies."""
    budget_bytes: int | None = None
    """What the stream should take at most; the report says by how much it takes more. None compares with nothing."""

    def __post_init__(self) -> None:
        """Check every field."""
        if self.keep_anchors < 2:
            raise ValueError(f"keep_anchors is {self.keep_anchors}; expected at least 2, see rule L1 of the format")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s is {self.grace_s}; expected 0 or more seconds")
        if not 1 <= self.claim_s <= _MAX_CLAIM_S:
            raise ValueError(f"claim_s is {self.claim_s}; expected 1 to {_MAX_CLAIM_S} seconds")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ValueError(f"budget_bytes is {self.budget_bytes}; expected 0 or more")


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
    profile: Profile = "auto"
    """How `packed` codes positions. `small`: by old exponent, about 0.7 of the bytes of `fast`, for one more pass over
    the owned shard at each collect. `fast`: plain gaps. `auto`: `small`, unless uploads run so fast that the bytes it
    saves take less time than the pass (`small_below_bytes_per_s`)."""
    small_below_bytes_per_s: float = 2e8
    """With `profile="auto"`: the measured upload speed of a rank, in stored bytes per second, above which `fast` is
    used."""
    zstd_level: int = 1
    """zstd level of `packed` and `xor` payloads, 1 to 19. `packed` is tuned at 1: a higher one takes longer, and
    level 3 more bytes for dense changes."""
    num_encode_threads: int = 2
    """Threads per rank that encode and upload one version."""
    part_bytes: int = 256 * _MIB
    """Changed bytes (indices and values, before compression) after which a rank starts another part."""
    num_put_attempts: int = 3
    """How often the upload of a part is tried before the version fails."""
    retry_delay_s: float = 0.5
    """Seconds before the second attempt of an upload or a commit; doubles for each further one, up to 10 s."""
    on_restart: OnRestart = "fork"
    """A trainer that is not at the newest version of an existing stream starts a new lineage beside it, which fences
    the old one's writer and which followers go over to (``"fork"``), or it is refused (``"refuse"``). A stream whose
    writer lives (see `alive_s`) is neither forked nor continued; ``"takeover"`` does both without looking."""
    alive_s: int = 60
    """Seconds without a sign of life after which this writer counts as dead for others that attach; it gives three
    signs in that time, each one small put. A trainer that starts again elsewhere after a crash waits up to this long. 0
    gives no signs: then a second trainer, started by mistake, is not told from a restart."""
    anchor_first: bool | None = None
    """Whether a stream without any anchor gets one when this writer attaches, in the background. None: where receivers
    cannot have the base by themselves, which is a folder and no Hub id while the stream is not a folder of this
    machine."""
    anchor_every: int | None = None
    """Write an anchor of every version that this divides; None leaves it to `anchor_share`."""
    anchor_share: float | None = 1.0
    """Write an anchor when taking the deltas since the newest one would cost a receiver more than this share of what
    taking an anchor costs, by the two speeds below; None writes them by `anchor_every` and on request only."""
    receiver_bytes_per_s: float = 2e8
    """Assumed of receivers, for `anchor_share`: stored bytes they download per second."""
    receiver_elements_per_s: float = 5e7
    """Assumed of receivers, for `anchor_share`: changed elements they decode and write per second."""
    anchor_least_s: float = 10.0
    """A chain that costs a receiver less than this many seconds calls for no anchor, however small the model."""
    anchor_spool_dir: str | None = None
    """Folder on a local disk for the copy of a rank's shard that an anchor is made from while training goes on; None is
    the system's folder for temporary files. Shards up to 256 MiB are copied in memory."""
    anchor_file_bytes: int = 5_000_000_000
    """Size after which an anchor starts another weight file; a larger tensor gets a file of its own."""
    retention: RetentionConfig | None = None
    """Delete what no reader needs whenever an anchor was written; None deletes nothing (see `torch-delta gc`)."""
    max_reports: int = 1000
    """Reports kept for `Publisher.wait` and `Publisher.reports`; older ones are dropped."""

    def __post_init__(self) -> None:
        """Check every field and every pair of fields that depend on each other."""
        self._check_counts()
        if self.mode not in get_args(SnapshotMode):
            raise ValueError(f"mode is {self.mode!r}; expected one of {', '.join(get_args(SnapshotMode))}")
        if self.profile not in get_args(Profile):
            raise ValueError(f"profile is {self.profile!r}; expected one of {', '.join(get_args(Profile))}")
        if not self.small_below_bytes_per_s > 0:
            raise ValueError(f"small_below_bytes_per_s is {self.small_below_bytes_per_s}; expected more than 0")
        if self.on_restart not in get_args(OnRestart):
            raise ValueError(f"on_restart is {self.on_restart!r}; expected one of {', '.join(get_args(OnRestart))}")
        self._check_encodings()
        for name in ("receipt_timeout_s", "commit_timeout_s", "wait_timeout_s", "attach_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected seconds above 0")
        if self.retry_delay_s < 0:
            raise ValueError(f"retry_delay_s is {self.retry_delay_s}; expected 0 or more seconds")
        for name in ("receiver_bytes_per_s", "receiver_elements_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        if self.anchor_share is not None and not self.anchor_share > 0:
            raise ValueError(f"anchor_share is {self.anchor_share}; expected more than 0, or None")
        if not self.anchor_least_s >= 0:
            raise ValueError(f"anchor_least_s is {self.anchor_least_s}; expected 0 or more seconds")
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
        if not isinstance(self.alive_s, int) or isinstance(self.alive_s, bool) or not 0 <= self.alive_s <= _MAX_CLAIM_S:
            raise ValueError(f"alive_s is {self.alive_s!r}; expected whole seconds, 0 to {_MAX_CLAIM_S}")
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
    def required_features(self) -> tuple[str, ...]:
        """What readers of a stream written like this must know."""
        return ("packed",) if "packed" in self.usable_encodings else ()

    @property
    def usable_encodings(self) -> tuple[str, ...]:
        """The encodings left when `absolute_only` has taken the relative ones away."""
        return tuple(e for e in self.encodings if not self.absolute_only or e in _ABSOLUTE_ENCODINGS)
