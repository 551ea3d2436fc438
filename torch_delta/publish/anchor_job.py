"""What writing an anchor is about: the version, the files, and what one rank brings to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_delta.capture.source import Bits, ChangeSource, OwnedBox, Region
    from torch_delta.config import PublishConfig
    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.publish.base import BaseCheckpoint
    from torch_delta.publish.coordination import Team
    from torch_delta.store.base import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorState:
    """What rank 0 knows of the version to copy."""

    stream_id: str
    version: int
    commit_sha256: str | None
    """None for an anchor that is written before its stream.json."""
    digests: Sequence[Digest]
    """In the order of `Schema.data_indices`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """One weight file of the anchor."""

    name: str
    owner: int
    tensors: tuple[int, ...]
    """Schema indices in the order they are stored."""


@dataclass(frozen=True, kw_only=True)
class AnchorJob:
    """What stays the same for every step of writing one anchor on this rank."""

    team: Team
    source: ChangeSource
    store: Store
    config: PublishConfig
    base: BaseCheckpoint | None
    """Where config, tokenizer and tensors that no model holds come from."""
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files beside the weights, by name; they give way to the base's."""


class AnchorSource(Protocol):
    """What an anchor is made of: a change source while nothing moves, or a snapshot of one."""

    @property
    def owned(self) -> Sequence[OwnedBox]:
        """See `ChangeSource.owned`."""
        ...

    def regions(self) -> Iterator[Region]:
        """See `ChangeSource.regions`."""
        ...

    def read(self, tensor: int, box: Box) -> Bits:
        """See `ChangeSource.read`."""
        ...
