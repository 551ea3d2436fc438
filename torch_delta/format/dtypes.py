"""Element types, in the spelling of safetensors, and how wide each is."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEMSIZE: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E5M2": 1,
        "F8_E4M3": 1,
        "F8_E8M0": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "I64": 8,
        "U64": 8,
        "F64": 8,
    },
)
"""Bytes per element of every dtype a tensor of a stream can have."""


def unit_bytes(dtype: str) -> int:
    """Bytes of one digest word of a dtype: the element's own width, except that 8-byte elements are two words of 4.

    Raises:
        KeyError: the dtype is not in `ITEMSIZE`.
    """
    return min(ITEMSIZE[dtype], 4)
