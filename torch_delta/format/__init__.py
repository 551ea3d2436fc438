"""Bytes to plain objects and back: the stream format of docs/format.md. Standard library only.

Everything read is checked against the numbered rules of the specification before it is used; what breaks one raises
`torch_delta.errors.FormatError` with the rule's number.
"""

from torch_delta.format.anchor import AnchorFile, AnchorManifest
from torch_delta.format.box import Box, check_disjoint, covers, find_overlap
from torch_delta.format.chain import ApplyDelta, LoadAnchor, Step, check_parent, plan
from torch_delta.format.commit import Commit, PartRef
from torch_delta.format.digest import ZERO, Digest, digest_words, state_sha256
from torch_delta.format.dtypes import ITEMSIZE, unit_bytes
from torch_delta.format.encodings import ENCODINGS, Encoding, coo_index_name
from torch_delta.format.frames import Frame, Slice, check_absolute, check_slices_disjoint
from torch_delta.format.head import Head, Successor
from torch_delta.format.keys import validate_key
from torch_delta.format.part import Part, PartHeader, encode_part, parse_part, payload_sizes
from torch_delta.format.retention import DropAnchors, DropVersion, plan_deletion
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.format.sealed import seal, sha256_hex, unseal
from torch_delta.format.streaminfo import BaseInfo, StreamInfo

__all__ = [
    "ENCODINGS",
    "ITEMSIZE",
    "ZERO",
    "AnchorFile",
    "AnchorManifest",
    "ApplyDelta",
    "BaseInfo",
    "Box",
    "Commit",
    "Digest",
    "DropAnchors",
    "DropVersion",
    "Encoding",
    "Frame",
    "Head",
    "LoadAnchor",
    "Part",
    "PartHeader",
    "PartRef",
    "Schema",
    "Slice",
    "Step",
    "StreamInfo",
    "Successor",
    "TensorSpec",
    "check_absolute",
    "check_disjoint",
    "check_parent",
    "check_slices_disjoint",
    "coo_index_name",
    "covers",
    "digest_words",
    "encode_part",
    "find_overlap",
    "parse_part",
    "payload_sizes",
    "plan",
    "plan_deletion",
    "seal",
    "sha256_hex",
    "state_sha256",
    "unit_bytes",
    "unseal",
    "validate_key",
]
