"""The tensor table of a stream: which tensors exist, in which order, with which dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch_delta.format.checks import Fields, broken
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.limits import MAX_DIMS, MAX_JSON_BYTES, MAX_NAME_BYTES, MAX_NUMEL, MAX_TENSORS
from torch_delta.format.sealed import dump_json, load_json, sha256_hex

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a stream.

    Attributes:
        name: the checkpoint name (Hugging Face), not a module path.
        dtype: safetensors spelling, such as ``BF16``; a key of `ITEMSIZE`.
        shape: extents, row-major; ``()`` for a scalar.
        alias_of: the tensor this one shares its data with (tied weights), or None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None

    def __post_init__(self) -> None:
        name = self.name
        if not name.isprintable() or not 1 <= len(name.encode()) <= MAX_NAME_BYTES or name == "__metadata__":
            raise broken("S3", "schema", f"a tensor name is 1 to {MAX_NAME_BYTES} printable bytes, got {name[:80]!r}")
        if self.dtype not in ITEMSIZE:
            raise broken("S4", "schema", f"tensor {name!r} has dtype {self.dtype!r}; known: {', '.join(ITEMSIZE)}")
        if len(self.shape) > MAX_DIMS or any(extent < 0 for extent in self.shape) or prod(self.shape) > MAX_NUMEL:
            raise broken(
                "S4", "schema", f"tensor {name!r} has shape {self.shape}: too many dims or elements, or negative"
            )

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Schema:
    """All tensors of a stream, sorted by the UTF-8 bytes of their names; a tensor's place is its *schema index*.

    Attributes:
        tensors: in schema order.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise broken("S2", "schema", f"at most {MAX_TENSORS} tensors, got {len(self.tensors)}")
        names = [spec.name for spec in self.tensors]
        # Code points sort like their UTF-8 bytes.
        for before, after in pairwise(names):
            if before >= after:
                raise broken("S2", "schema", f"tensors are sorted by name, each once; {after!r} follows {before!r}")
        for spec in self.tensors:
            if spec.alias_of is not None:
                self._check_alias(spec)

    def _check_alias(self, spec: TensorSpec) -> None:
        target = self.by_name.get(spec.alias_of or "")
        if target is None or target.alias_of is not None or (target.dtype, target.shape) != (spec.dtype, spec.shape):
            raise broken(
                "S5",
                "schema",
                f"tensor {spec.name!r} is an alias of {spec.alias_of!r}, which must be a tensor with data, of the same "
                f"dtype and shape",
            )

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.name: at for at, spec in enumerate(self.tensors)}

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """Every tensor by its name."""
        return MappingProxyType({spec.name: spec for spec in self.tensors})

    @cached_property
    def data_indices(self) -> tuple[int, ...]:
        """Schema indices of the tensors that carry data, ascending: all but aliases."""
        return tuple(at for at, spec in enumerate(self.tensors) if spec.alias_of is None)

    @cached_property
    def _stored(self) -> bytes:
        entries: list[dict[str, Any]] = []
        for spec in self.tensors:
            entry: dict[str, Any] = {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
            if spec.alias_of is not None:
                entry["alias_of"] = spec.alias_of
            entries.append(entry)
        return dump_json({"tensors": entries}, key="schema")

    @cached_property
    def id(self) -> str:
        """sha256 of the stored bytes, in hex; part of the object's key."""
        return sha256_hex(self._stored)

    def index(self, name: str) -> int:
        """Schema index of a tensor, in O(1).

        Raises:
            KeyError: there is no tensor of that name.
        """
        return self._index[name]

    def to_bytes(self) -> bytes:
        """The stored bytes; a schema that was read gives back the bytes it was read from."""
        return self._stored

    @classmethod
    def from_bytes(cls, data: bytes, *, schema_id: str | None = None) -> Schema:
        """Parse stored bytes.

        Args:
            data: the stored object.
            schema_id: the id the object's key (or stream.json) promises; checked if given.

        Raises:
            FormatError: rules S1 to S5 or the JSON rules are broken.
        """
        key = "schema" if schema_id is None else f"schema/{schema_id}.json"
        if len(data) > MAX_JSON_BYTES:
            raise broken("J5", key, f"at most {MAX_JSON_BYTES} bytes are read, got {len(data)}")
        found = sha256_hex(data)
        if schema_id is not None and found != schema_id:
            raise broken("S1", key, f"the name promises sha256 {schema_id}, the bytes have {found}: damaged")
        fields = Fields(load_json(data, key=key), key=key)
        schema = cls(
            tuple(
                _tensor(Fields(entry, key=key, where=f"tensors[{at}]."))
                for at, entry in enumerate(fields.items("tensors", dict, max_items=MAX_TENSORS, rule="S2"))
            ),
        )
        # Unknown optional fields of a newer minor version must survive: the id is that of the bytes as stored.
        schema.__dict__["_stored"] = bytes(data)
        schema.__dict__["id"] = found
        return schema


def _tensor(fields: Fields) -> TensorSpec:
    return TensorSpec(
        name=fields.text("name"),
        dtype=fields.text("dtype"),
        shape=tuple(fields.items("shape", int, max_items=MAX_DIMS, rule="S4")),
        alias_of=fields.text_or_none("alias_of"),
    )
