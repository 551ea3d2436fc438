"""The additive digest of a tensor's bits: its definition, and the plain-Python reference.

128 bits in two lanes. With `w_i` the i-th word of the full tensor in row-major order (see `dtypes.unit_bytes`):

    K_l[c] = splitmix64((l << 48) + c) | 1            c < 1024
    B_l[b] = splitmix64(((2 + l) << 48) + b) | 1
    D_l    = sum over i of K_l[i mod 1024] * B_l[i div 1024] * w_i   mod 2**64,   l = 0, 1

It is a sum, so digests of disjoint boxes add up to the tensor's whatever the mesh was, and changing an element costs
`key(i) * (new - old)`. It finds accidents, not attackers; sha256 covers objects in transit. Arrays are digested by
`torch_delta.codec.digest`, which is tested against this module.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final

from torch_delta.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK64: Final = 2**64 - 1
DIGEST_BYTES: Final = 16
NUM_COLUMN_KEYS: Final = 1024
"""Words that share one block key; the column keys repeat with this period."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest, or a difference of two. `Digest` values form a group: they add and subtract lane by lane mod 2**64.

    Attributes:
        lanes: `(D_0, D_1)`, each in `[0, 2**64)`.
    """

    lanes: tuple[int, int]

    ZERO: ClassVar[Digest]

    def __add__(self, other: Digest) -> Digest:
        a, b = self.lanes
        c, d = other.lanes
        return Digest(((a + c) & MASK64, (b + d) & MASK64))

    def __sub__(self, other: Digest) -> Digest:
        a, b = self.lanes
        c, d = other.lanes
        return Digest(((a - c) & MASK64, (b - d) & MASK64))

    def to_bytes(self) -> bytes:
        """`D_0` then `D_1`, 8 bytes each, little-endian."""
        return self.lanes[0].to_bytes(8, "little") + self.lanes[1].to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> Digest:
        """Inverse of `to_bytes`.

        Raises:
            FormatError: `data` is not 16 bytes long.
        """
        if len(data) != DIGEST_BYTES:
            raise FormatError(f"a digest has {DIGEST_BYTES} bytes, got {len(data)} (rule D4)", rule="D4")
        return cls((int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")))

    def hex(self) -> str:
        """The 32 hex digits of `to_bytes`."""
        return self.to_bytes().hex()

    def __str__(self) -> str:
        return self.hex()


ZERO: Final = Digest((0, 0))
"""Digest of an empty tensor, of an all-zero tensor, and of 'nothing changed'."""
Digest.ZERO = ZERO


def splitmix64(x: int) -> int:
    """The finaliser that turns a counter into a pseudo-random key, mod 2**64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=2)
def column_keys(lane: int) -> tuple[int, ...]:
    """`K_lane[0..1023]`, all odd."""
    return tuple(splitmix64((lane << 48) + column) | 1 for column in range(NUM_COLUMN_KEYS))


def block_key(lane: int, block: int) -> int:
    """`B_lane[block]`, odd; `block` is the word index divided by 1024."""
    return splitmix64(((2 + lane) << 48) + block) | 1


def word_key(lane: int, index: int) -> int:
    """What the word at `index` is multiplied with in a lane."""
    return column_keys(lane)[index % NUM_COLUMN_KEYS] * block_key(lane, index // NUM_COLUMN_KEYS) & MASK64


def digest_words(words: Iterable[int], start: int = 0) -> Digest:
    """Digest of consecutive words by the definition; slow, for test vectors and as an oracle.

    Args:
        words: unsigned integers, each below `2 ** (8 * unit_bytes)`.
        start: index of the first of them among the words of the full tensor.
    """
    first = second = 0
    for index, word in enumerate(words, start):
        first += word_key(0, index) * word
        second += word_key(1, index) * word
    return Digest((first & MASK64, second & MASK64))


def state_sha256(digests: Iterable[Digest]) -> str:
    """The hash of a whole state: sha256, in hex, of the digests of all tensors that are no alias, in schema order."""
    return hashlib.sha256(b"".join(digest.to_bytes() for digest in digests)).hexdigest()


def digests_hex(digests: Iterable[Digest]) -> str:
    """Digests as one string, 32 hex digits each: how JSON objects carry them."""
    return b"".join(digest.to_bytes() for digest in digests).hex()


def parse_digests_hex(text: str) -> tuple[Digest, ...]:
    """Inverse of `digests_hex`.

    Raises:
        FormatError: not lower-case hex, or not a whole number of digests.
    """
    step = 2 * DIGEST_BYTES
    if len(text) % step or text.strip("0123456789abcdef"):
        raise FormatError(f"digests are lower-case hex in groups of {step}, got {text[:80]!r} (rule D4)", rule="D4")
    raw = bytes.fromhex(text)
    return tuple(Digest.from_bytes(raw[at : at + DIGEST_BYTES]) for at in range(0, len(raw), DIGEST_BYTES))
