"""What `prepare` hands to `Session.apply`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch_delta.format.digest import Digest


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One version or several merged, decoded and proved, ready to be written; the checkpoint has not changed yet.

    Attributes:
        since: version it leads from.
        version: it leads to.
        parent_sha256: of the commit it may be applied on.
        commit_sha256: of its own commit.
        digests: of all tensors at `version`, in schema order.
        patch: file in the checkpoint's `tmp/` folder with the absolute values, not yet synced.
        patch_hash: of that file, see `patches.file_hash`.
        num_changed: elements it sets.
    """

    since: int
    version: int
    parent_sha256: str
    commit_sha256: str
    digests: tuple[Digest, ...]
    patch: Path
    patch_hash: str
    num_changed: int
