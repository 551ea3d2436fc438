"""Which files of an anchor need no upload, because the newest anchor has them.

Rank 0 has them copied inside the store before anybody stages. It knows from the digests of the version alone, so it
waits for the version's commit first, but only where there is an anchor to take something from. Ranks still digest their
boxes of these files: that the shards *are* the version is checked for every tensor of an anchor.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.stream.reuse import Reuse
from torch_delta.stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_delta.format.anchor import AnchorFile
    from torch_delta.publish.anchor_job import AnchorJob, AnchorState, FilePlan

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What rank 0 decided before the ranks begin."""

    nonce: str
    """Of the anchor."""
    numbers: frozenset[int]
    """Weight files, by their place in the plan, that are there already."""
    files: tuple[AnchorFile, ...] = ()
    """They; on rank 0."""
    reuse: Reuse | None = field(default=None, repr=False)
    """For the small files; on rank 0."""

    def to_bytes(self) -> bytes:
        """Pack what the other ranks must know."""
        said = json.dumps({"nonce": self.nonce, "numbers": sorted(self.numbers)}).encode()
        return _LENGTH.pack(len(said)) + said

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Shared, int]:
        """What was packed, and how many bytes it took."""
        (length,) = _LENGTH.unpack_from(data)
        said = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        return cls(nonce=said["nonce"], numbers=frozenset(said["numbers"])), _LENGTH.size + length


def share_files(
    job: AnchorJob,
    version: int,
    nonce: str,
    plan: Sequence[FilePlan],
    state: Callable[[], AnchorState | None],
) -> Shared:
    """Copy the weight files that did not change since the newest anchor; on rank 0.

    Args:
        job: of rank 0.
        version: to be copied.
        nonce: of the anchor.
        plan: its weight files.
        state: gives what the version is; waits for its commit.

    Raises:
        TorchDeltaError: the version was not committed, or the store gives no clear answer.
    """
    reuse = Reuse(Stream(job.store), version, nonce)
    if not reuse.is_possible:
        return Shared(nonce=nonce, numbers=frozenset())
    known = state()
    assert known is not None
    schema = job.source.schema
    digests = dict(zip(schema.data_indices, known.digests, strict=True))
    found = {}
    for number, file in enumerate(plan):
        taken = reuse.weights(file.name, {schema.tensors[t].name: digests[t] for t in file.tensors})
        if taken is not None:
            found[number] = taken
    return Shared(nonce=nonce, numbers=frozenset(found), files=tuple(found.values()), reuse=reuse)
