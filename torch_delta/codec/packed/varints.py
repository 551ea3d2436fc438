"""Many LEB128 varints at once, as arrays. The table of a part uses the same form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torch_delta.format.checks import broken

if TYPE_CHECKING:
    from torch_delta.codec.bits import Bits

_MOST_BYTES = 9
_GROUPS = np.arange(_MOST_BYTES, dtype=np.uint64) * np.uint64(7)


def encode(values: npt.NDArray[np.uint64]) -> bytes:
    """Values below 2**63 as shortest varints, one after the other."""
    if not values.size:
        return b""
    # Most lists hold small numbers, so that one or two columns do.
    num_groups = max(1, -(-int(values.max()).bit_length() // 7))
    if num_groups == 1:
        return values.astype(np.uint8).tobytes()
    rest = values[:, None] >> _GROUPS[:num_groups]
    is_used = rest != 0
    is_used[:, 0] = True
    data = (rest & np.uint64(127)).astype(np.uint8)
    data[:, :-1] |= is_used[:, 1:].astype(np.uint8) << 7
    stored: bytes = data[is_used].tobytes()
    return stored


def decode(data: memoryview, *, key: str) -> npt.NDArray[np.uint64]:
    """The values of a stream of varints.

    Raises:
        FormatError: one is cut off, longer than needed, or 2**63 or more (rule E9).
    """
    stored: Bits = np.frombuffer(data, np.uint8)
    if not stored.size:
        return np.empty(0, np.uint64)
    if stored.max() < 128:
        return stored.astype(np.uint64)
    ends = np.flatnonzero(stored < 128)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    is_short = (lengths == 1) | (stored[ends] != 0)
    if stored[-1] >= 128 or int(lengths.max()) > _MOST_BYTES or not bool(is_short.all()):
        raise broken("E9", key, "a varint in a packed frame is cut off, longer than needed or too large")
    place = np.arange(stored.size) - np.repeat(starts, lengths)
    groups = (stored & 127).astype(np.uint64) << _GROUPS[place]
    values: npt.NDArray[np.uint64] = np.add.reduceat(groups, starts)
    return values
