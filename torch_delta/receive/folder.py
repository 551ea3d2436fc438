"""Where the bits of each tensor lie in a folder of safetensors files, as Hugging Face libraries lay them out.

Only headers are read here. The rule for which files count is the one `from_pretrained` follows: `model.safetensors` if
there is one, else the files its index names, else every `*.safetensors` file; anything else (`consolidated.safetensors`
beside an index, for one) is another copy of the same weights and is not looked at.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError, StoreUnavailable
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.schema import Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_SINGLE = "model.safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit safetensors itself sets
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """One tensor's place on disk.

    Attributes:
        file: file name inside the folder.
        offset_bytes: of the first element, from the start of the file.
        dtype: safetensors spelling, such as ``BF16``.
        shape: of the full tensor, row-major on disk; ``()`` for a scalar.
        size_bytes: of the tensor's data.
    """

    file: str
    offset_bytes: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a checkpoint folder.

    Attributes:
        path: the folder.
        files: names of the weight files that count, sorted.
        tensors: tensor name to location.
    """

    path: Path
    files: tuple[str, ...]
    tensors: Mapping[str, TensorLocation]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFolder:
        """Read and check the headers of the weight files under `path`.

        Raises:
            FormatError: no weights, a damaged or hostile header or index, or two files holding the same tensor.
            StoreUnavailable: a file could not be read.
        """
        files = weight_files(path)
        if not files:
            raise FormatError(f"{path} holds no *.safetensors file; expected a checkpoint folder", key=str(path))
        tensors: dict[str, TensorLocation] = {}
        for file in files:
            for name, location in read_header(path / file).items():
                if name in tensors:
                    raise FormatError(
                        f"{path}: tensor {name!r} is in {tensors[name].file} and in {file}", key=file, tensor=name
                    )
                tensors[name] = location
        return cls(path=path, files=files, tensors=tensors)

    def schema(self) -> Schema:
        """What the folder holds, as a schema without aliases (used for a checkpoint that follows no stream yet)."""
        return Schema(tuple(TensorSpec(name, t.dtype, t.shape) for name, t in sorted(self.tensors.items())))

    def differences(self, schema: Schema, *, allow_extra: Iterable[str] = ()) -> list[str]:
        """How the folder's tensors differ from `schema`, one line each; empty when they agree (F11).

        An alias may be absent (safetensors stores tied weights once) or present with the same shape and dtype.
        """
        found = []
        for spec in schema.tensors:
            location = self.tensors.get(spec.name)
            if location is None:
                if spec.alias_of is None:
                    found.append(f"{spec.name}: missing, expected {spec.dtype} {list(spec.shape)}")
            elif (location.dtype, location.shape) != (spec.dtype, tuple(spec.shape)):
                found.append(
                    f"{spec.name}: expected {spec.dtype} {list(spec.shape)}, "
                    f"got {location.dtype} {list(location.shape)} in {location.file}"
                )
        known = {spec.name for spec in schema.tensors}.union(allow_extra)
        found.extend(f"{name}: the stream has no such tensor" for name in sorted(self.tensors.keys() - known))
        return found


def weight_files(path: Path) -> tuple[str, ...]:
    """Names of the weight files that count in the checkpoint folder `path`, sorted; empty when there are none."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise StoreUnavailable(f"cannot list {path}: {error.strerror}", path=str(path), operation="list") from error
    if _SINGLE in names:
        return (_SINGLE,)
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if indices:
        chosen = "model" + _INDEX_SUFFIX
        return _indexed_files(path / (chosen if chosen in indices else indices[0]), names)
    return tuple(name for name in names if name.endswith(".safetensors") and not name.startswith("."))


def _indexed_files(index: Path, names: list[str]) -> tuple[str, ...]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise FormatError(f"{index}: larger than {_MAX_INDEX_BYTES} bytes", key=index.name)
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
    except OSError as error:
        raise StoreUnavailable(f"cannot read {index}: {error.strerror}", path=str(index), operation="get") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f'{index}: not an index with a "weight_map" from tensor to file', key=index.name) from error
    for file in files:
        # A name with a path in it could lead the in-place writer out of the folder.
        if not isinstance(file, str) or "/" in file or "\\" in file or "\0" in file or file.startswith("."):
            raise FormatError(f"{index}: {file!r} is not a plain file name", key=index.name)
        if file not in names:
            raise FormatError(f"{index}: names {file!r}, which is not in the folder", key=index.name)
    return tuple(files)


def read_header(file: Path) -> dict[str, TensorLocation]:
    """Tensors of one safetensors file, everything declared checked against the file's size.

    Raises:
        FormatError: the header is damaged or promises bytes the file does not have.
        StoreUnavailable: the file could not be read.
    """
    try:
        with file.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if size_bytes < 8 or length > min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise FormatError(
                    f"{file}: cut off or not a safetensors file ({size_bytes} bytes, header of {length})", key=file.name
                )
            text = stream.read(length)
    except OSError as error:
        raise StoreUnavailable(f"cannot read {file}: {error.strerror}", path=str(file), operation="get") from error
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        start = 8 + length
        tensors = {name: _location(file.name, name, entry, start, size_bytes) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{file}: damaged safetensors header: {error}", key=file.name) from error
    end = start
    for name, location in sorted(tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].size_bytes)):
        if location.offset_bytes < end:
            raise FormatError(f"{file}: tensor {name!r} overlaps another one", key=file.name, tensor=name)
        end = location.offset_bytes + location.size_bytes
    return tensors


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _location(file: str, name: str, entry: dict[str, object], start: int, file_bytes: int) -> TensorLocation:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(ITEMSIZE)}")
    if not isinstance(shape, list) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"tensor {name!r} has shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int for at in offsets):
        raise ValueError(f"tensor {name!r} has data_offsets {offsets!r}")
    begin, end = offsets
    size_bytes = math.prod(shape) * ITEMSIZE[dtype]
    if begin < 0 or end - begin != size_bytes or start + end > file_bytes:
        raise ValueError(
            f"tensor {name!r} of {size_bytes} bytes claims bytes {begin} to {end} of {file_bytes - start}; cut off?"
        )
    return TensorLocation(file, start + begin, dtype, tuple(shape), size_bytes)
