"""What a rank is told about the working copy of its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.receive.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The working copy, held still.

    Attributes:
        version: it is at.
        digests: of every tensor with data, by schema index.
        weights: its bits; valid while the snapshot is held.
    """

    version: int
    digests: Mapping[int, Digest]
    weights: Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class BringReport:
    """What bringing the working copy to a version took; 0 where another process did it."""

    version: int
    """It is at now."""
    num_versions: int
    """Steps that were taken here."""
    num_changed: int
    """Elements they set."""
    stored_bytes: int
    """Fetched from the store."""
    wait_s: float
    """Seconds for other processes of this host."""
    fetch_s: float
    """Seconds of downloads."""
    decode_s: float
    """Seconds of checking and decoding."""
    verify_s: float
    """Seconds of digests of whole tensors."""
    apply_s: float
    """Seconds of writing the working copy."""
