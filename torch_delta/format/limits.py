"""Every bound of the stream format in one place (docs/format.md, "Limits").

A reader checks a declared size against these and against the bytes it really holds before it allocates anything, so
that a hostile or damaged object costs bounded memory and time.
"""

from __future__ import annotations

from typing import Final

FORMAT_NAME: Final = "torch-delta"
"""`format` of every stream.json."""
FORMAT_VERSION: Final = (1, 0)
"""`(major, minor)` this package writes; it reads every minor of its major."""
SUPPORTED_FEATURES: Final[frozenset[str]] = frozenset({"packed"})
"""`required_features` this package knows."""

MAX_INT: Final = 2**53 - 1
"""Largest integer in JSON, and so the largest version: exact in every JSON implementation."""
MAX_DEPTH: Final = 16
"""Nesting of arrays and objects in JSON."""
MAX_JSON_BYTES: Final = 64 << 20
"""Stored bytes of one JSON object (stream.json, schema, commit, anchor manifest)."""
MAX_HINT_BYTES: Final = 64 << 10
"""Stored bytes of head.json, successor.json, a lease and a claim."""

MAX_KEY_BYTES: Final = 512
MAX_SEGMENT_BYTES: Final = 200
"""Leaves room below the 255 bytes of most file systems for the suffix of a temporary name."""
MAX_RANK: Final = 99_999
MAX_SEQ: Final = 9_999

MAX_TENSORS: Final = 2**18
MAX_NAME_BYTES: Final = 512
"""UTF-8 bytes of a tensor name."""
MAX_DIMS: Final = 16
MAX_NUMEL: Final = 2**48
"""Elements of one tensor; keeps every byte size and word index below 2**52."""

MAX_PARTS: Final = 2**16
"""Parts of one commit."""
MAX_SLICES: Final = 2**18
"""Slices of one part; a sender with more uploads several parts."""
MAX_HEADER_BYTES: Final = 64 << 10
"""JSON header of a part: it names a few dozen tensors at most."""
MAX_TABLE_BYTES: Final = 32 << 20
MAX_VARINT: Final = 2**63 - 1
MAX_FRAME_RAW_BYTES: Final = 8 << 20
"""Decoded bytes of a `packed` frame, and of an `xor` frame with more than one slice."""
MAX_BOX_COMPARISONS: Final = 2**24
"""Pairs of boxes compared before a set of boxes counts as hostile."""

MAX_ANCHOR_FILES: Final = 2**16
MAX_LEASE_SECONDS: Final = 604_800
"""Life of a lease or a claim that is not renewed: a dead reader stops nobody for longer than a week."""
MAX_FEATURES: Final = 64
MAX_INFO_ENTRIES: Final = 64
MAX_INFO_KEY_BYTES: Final = 64
MAX_INFO_VALUE_BYTES: Final = 4096
