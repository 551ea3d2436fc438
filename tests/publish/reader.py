"""A reader of streams in a directory that shares no code with the package: json, hashlib, numpy, zstandard.

It follows docs/format.md only as far as a test needs: it replays every commit on a given base and returns the state.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from tests.codec import packed_oracle

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "I64": 8, "U8": 1, "U32": 4, "U64": 8}
ENCODINGS = {1: "coo", 2: "xor", 3: "dense", 4: "packed"}


def sealed(path: Path) -> dict:
    """A JSON object and, on the second line, the sha256 of the first."""
    text, _, seal = path.read_bytes().partition(b"\n")
    assert hashlib.sha256(text).hexdigest().encode() in seal, path
    return json.loads(text)


def versions(root: Path) -> list[int]:
    return sorted(int(path.stem) for path in (root / "commits").glob("*.json")) if (root / "commits").is_dir() else []


def replay(root: Path, base: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The state at every version, `base` being version 0: name -> unsigned bits in full shape."""
    stream = sealed(root / "stream.json")
    schema = json.loads((root / "schema" / f"{stream['schema']}.json").read_bytes())["tensors"]
    parent = hashlib.sha256((root / "stream.json").read_bytes()).hexdigest()
    states = [{name: bits.copy() for name, bits in base.items()}]
    for version in itertools.count(1):
        path = root / "commits" / f"{version:020d}.json"
        if not path.exists():
            assert versions(root) == list(range(1, version)), "a gap in the versions"
            return states
        commit = sealed(path)
        assert (commit["stream_id"], commit["version"]) == (stream["stream_id"], version)
        assert commit["parent_sha256"] == parent
        parent = hashlib.sha256(path.read_bytes()).hexdigest()
        state = {name: bits.copy() for name, bits in states[-1].items()}
        changed = 0
        for part in commit["parts"]:
            data = (root / part["key"]).read_bytes()
            assert len(data) == part["bytes"]
            assert hashlib.sha256(data).hexdigest() == part["sha256"]
            changed += apply_part(data, schema, states[-1], state)
        assert changed == commit["changed"]
        states.append(state)
    raise AssertionError


def apply_part(data: bytes, schema: list[dict], old: dict, new: dict) -> int:
    """Write what a part says into `new`; `old` is the state before the version."""
    arrays = tensors_of(data)
    cursors = dict.fromkeys(arrays, 0)

    def take(name: str, nbytes: int) -> bytes:
        start = cursors[name]
        cursors[name] += nbytes
        return arrays[name][start : start + nbytes]

    numbers = iter(varints(arrays["table"]))
    changed = 0
    for _ in range(next(numbers)):
        encoding, num_slices = ENCODINGS[next(numbers)], next(numbers)
        stored, raw = (next(numbers), next(numbers)) if encoding in {"xor", "packed"} else (0, 0)
        blob = inflate(take("xor", stored), raw) if encoding == "xor" else b""
        pooled = []
        tensor = 0
        for _ in range(num_slices):
            step = next(numbers)
            tensor += step // 4
            spec = schema[tensor]
            offset, shape = read_box(step % 4, spec["shape"], numbers)
            numel = math.prod(shape)
            count = numel if encoding == "dense" else next(numbers)
            dtype = np.dtype(f"<u{WIDTH[spec['dtype']]}")
            at = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            bits = old[spec["name"]][at].copy().reshape(-1)
            if encoding == "dense":
                bits[:] = np.frombuffer(take(f"dense.{spec['dtype']}", numel * dtype.itemsize), dtype)
            elif encoding == "coo":
                index = np.frombuffer(take("coo.index.u32", 4 * count), "<u4")
                bits[index] = np.frombuffer(take(f"coo.value.{spec['dtype']}", count * dtype.itemsize), dtype)
            elif encoding == "packed":
                pooled.append((spec["name"], at, spec["dtype"], dtype, count, bits))
            else:
                delta, blob = blob[: numel * dtype.itemsize], blob[numel * dtype.itemsize :]
                bits ^= np.frombuffer(delta, dtype)
            new[spec["name"]][at] = bits.reshape(shape)
            changed += count
        if pooled:
            slices = [(kind, dtype.itemsize, count, bits.tolist()) for _, _, kind, dtype, count, bits in pooled]
            found = packed_oracle.decode(take("packed", stored), slices)
            for (name, at, _, _, _, bits), result in zip(pooled, found, strict=True):
                bits[list(result)] = list(result.values())
                new[name][at] = bits.reshape(new[name][at].shape)
    assert all(cursors[name] == len(arrays[name]) for name in arrays if name not in {"table", "increment"})
    return changed


def inflate(frame: bytes, raw: int) -> bytes:
    """The xor bytes of a frame, behind its base check of 16 bytes."""
    blob = zstandard.ZstdDecompressor().decompressobj().decompress(frame[16:])
    assert len(blob) == raw
    return blob


def read_box(kind: int, full: list[int], numbers) -> tuple[list[int], list[int]]:
    if kind == 0:
        return [0] * len(full), full
    if kind == 1:
        first, rows = next(numbers), next(numbers)
        return [first] + [0] * (len(full) - 1), [rows, *full[1:]]
    pairs = [(next(numbers), next(numbers)) for _ in full]
    return [first for first, _ in pairs], [extent for _, extent in pairs]


def varints(data: bytes) -> list[int]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    return values


def tensors_of(data: bytes) -> dict[str, bytes]:
    """Raw bytes of every tensor of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in header.items()
    }


def folder(path: Path, schema: list[dict]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint folder, as unsigned bits."""
    single = path / "model.safetensors"
    if single.exists():
        files = {None: tensors_of(single.read_bytes())}
        where = dict.fromkeys((spec["name"] for spec in schema), None)
    else:
        where = json.loads((path / "model.safetensors.index.json").read_bytes())["weight_map"]
        files = {name: tensors_of((path / name).read_bytes()) for name in set(where.values())}
    return {
        spec["name"]: np.frombuffer(files[where[spec["name"]]][spec["name"]], f"<u{WIDTH[spec['dtype']]}").reshape(
            spec["shape"]
        )
        for spec in schema
    }
