"""The registry of encodings this package can write and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch_delta.codec.encodings.coo import Coo
from torch_delta.codec.encodings.dense import Dense
from torch_delta.codec.encodings.packed import Packed
from torch_delta.codec.encodings.xor import Xor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.codec.encodings.base import Encoding

__all__ = ["REGISTRY"]

REGISTRY: Final[Mapping[str, Encoding]] = {entry.name: entry for entry in (Coo(), Packed(), Xor(), Dense())}
"""By name, in the order in which frames are laid out in a part."""
