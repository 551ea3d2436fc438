"""The registry of encodings: how the slices of a frame are stored. Arrays are coded by `torch_delta.codec`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from torch_delta.format.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_U32: Final = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One row of the registry in docs/format.md.

    Attributes:
        name: as frames carry it in memory.
        code: as the table of a part stores it.
        absolute: whether decoding needs no old bits.
        blob: whether a frame is one opaque byte string, whose sizes the table states.
        counted: whether the table states how many elements a slice sets; otherwise it sets its whole box.
        feature: what `required_features` must list, None for the encodings of format 1.0. A row whose feature this
            package does not support is reserved: its frames can be told apart, not read.
    """

    name: str
    code: int
    absolute: bool
    blob: bool
    counted: bool
    feature: str | None = None


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Encoding(name="coo", code=1, absolute=True, blob=False, counted=True),
            Encoding(name="xor", code=2, absolute=False, blob=True, counted=True),
            Encoding(name="dense", code=3, absolute=True, blob=False, counted=False),
            Encoding(name="packed", code=4, absolute=False, blob=True, counted=True, feature="packed"),
        )
    },
)
BY_CODE: Final[Mapping[int, Encoding]] = MappingProxyType({row.code: row for row in ENCODINGS.values()})

PACKED_NUM_CLASSES: Final = 8
"""Classes of old exponents in a `packed` slice that has classes."""
PACKED_MAX_SHIFT: Final = 22
"""Largest Rice shift: gaps are below 2**23."""
PACKED_MASK: Final = 31
"""Mode of a list that is stored as a bit per element of its class."""
PACKED_EXPONENT: Final[Mapping[str, tuple[int, int, bool]]] = MappingProxyType(
    {
        "BF16": (7, 8, True),
        "F16": (10, 5, True),
        "F32": (23, 8, True),
        "F64": (52, 11, True),
        "F8_E5M2": (2, 5, True),
        "F8_E4M3": (3, 4, True),
        "F8_E8M0": (0, 8, False),
    },
)
"""Bits below the exponent, bits of the exponent, whether elements are sign and magnitude (rule E8)."""
NO_EXPONENT: Final = (0, 0, False)
"""The same of every other dtype."""

TABLE: Final = "table"
INCREMENT: Final = "increment"

PAYLOAD_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "coo.index.u32": "U32",
        "coo.index.u64": "U64",
        **{f"coo.value.{dtype}": dtype for dtype in ITEMSIZE},
        **{f"dense.{dtype}": dtype for dtype in ITEMSIZE},
        **{row.name: "U8" for row in ENCODINGS.values() if row.blob},
    },
)
"""Every payload tensor a part can have, and its safetensors dtype."""


def coo_index_name(numel: int) -> str:
    """The tensor that holds the indices of a `coo` slice whose box has `numel` elements."""
    return "coo.index.u32" if numel <= MAX_U32 else "coo.index.u64"
