"""A stream and its checkpoints written by hand from docs/format.md: shares no code with the package it tests.

Elements are numpy unsigned integers throughout; what a reader must end with is `Trainer.bits`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import zstandard

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}
CODE = {"coo": 1, "xor": 2, "dense": 3}


def mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest(flat: np.ndarray, at: np.ndarray | None = None) -> tuple[int, int]:
    """Two lanes over elements `flat`, whose indices in the full tensor are `at` (by default 0, 1, 2, ...)."""
    at = np.arange(flat.size, dtype=np.uint64) if at is None else at.astype(np.uint64)
    words, index = flat.astype(np.uint64), at
    if flat.dtype.itemsize == 8:
        words = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], 1).reshape(-1)
        index = np.stack([2 * at, 2 * at + np.uint64(1)], 1).reshape(-1)
    lanes = []
    for lane in (0, 1):
        column = mix(np.uint64(lane << 48) + index % np.uint64(1024)) | np.uint64(1)
        block = mix(np.uint64((2 + lane) << 48) + index // np.uint64(1024)) | np.uint64(1)
        lanes.append(int((column * block * words).sum(dtype=np.uint64)))
    return lanes[0], lanes[1]


def packed(lanes: tuple[int, int]) -> bytes:
    return b"".join((lane % 2**64).to_bytes(8, "little") for lane in lanes)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def sealed(fields: dict) -> bytes:
    line = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def safetensors(tensors: list[tuple[str, str, list[int], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    header: dict = {"__metadata__": metadata} if metadata is not None else {}
    at = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors)


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Bits of every tensor in the weight files of a folder, read with nothing but struct and json."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + at for at in entry["data_offsets"])
            found[name] = np.frombuffer(data[begin:end], f"<u{WIDTH[entry['dtype']]}").reshape(entry["shape"])
    return found


@dataclass
class Slice:
    """What one rank says about one box: elements of `new` where `changed`, or the whole box for `dense`."""

    name: str
    offset: tuple[int, ...]
    new: np.ndarray
    encoding: str = "coo"


@dataclass
class Trainer:
    """Owns the truth, and writes bases, parts, commits and anchors below `root`.

    Args:
        root: of the stream, a directory.
        dtypes: tensor name to dtype.
        bits: tensor name to its elements, unsigned.
        ties: alias name to the tensor it shares.
    """

    root: Path
    dtypes: dict[str, str]
    bits: dict[str, np.ndarray]
    ties: dict[str, str] = field(default_factory=dict)
    absolute_only: bool = False
    version: int = 0
    history: list[dict[str, np.ndarray]] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    num_changed: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.stream_id = secrets.token_hex(16)
        self.names = sorted([*self.bits, *self.ties])
        self.bits = {name: bits.copy() for name, bits in self.bits.items()}
        self.history.append({name: bits.copy() for name, bits in self.bits.items()})
        tensors = []
        for name in self.names:
            source = self.ties.get(name, name)
            entry = {"name": name, "dtype": self.dtypes[source], "shape": list(self.bits[source].shape)}
            tensors.append({**entry, "alias_of": source} if name in self.ties else entry)
        schema = json.dumps({"tensors": tensors}, sort_keys=True, separators=(",", ":")).encode()
        self.schema_id = hashlib.sha256(schema).hexdigest()
        self.put(f"schema/{self.schema_id}.json", schema)

    def start(self, kind: str = "local", name: str = "handmade") -> Trainer:
        stored = sealed(
            {
                "format": "torch-delta",
                "format_version": [1, 0],
                "stream_id": self.stream_id,
                "schema": self.schema_id,
                "base": {"kind": kind, "name": name, "revision": None, "digests": self.digests().hex()},
                "required_features": [],
                "absolute_only": self.absolute_only,
                "info": {},
            }
        )
        self.put("stream.json", stored)
        self.parents.append(hashlib.sha256(stored).hexdigest())
        return self

    def put(self, key: str, data: bytes) -> Path:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f".{secrets.token_hex(8)}"
        temporary.write_bytes(data)
        temporary.replace(path)
        return path

    def data_names(self) -> list[str]:
        return [name for name in self.names if name not in self.ties]

    def digests(self) -> bytes:
        return b"".join(packed(digest(self.bits[name].reshape(-1))) for name in self.data_names())

    def part(self, version: int, rank: int, slices: list[Slice], *, seq: int = 0, metadata: dict | None = None) -> dict:
        """Write one part; its frames are one per encoding. Returns its entry for the commit."""
        frames = []
        increments = []
        payload: dict[str, list[bytes]] = {}
        changed_total = 0
        for encoding in ("coo", "xor", "dense"):
            chosen = [item for item in slices if item.encoding == encoding]
            chosen.sort(key=lambda item: (self.names.index(item.name), item.offset))
            if not chosen:
                continue
            rows, blob, raw_bytes, before, check = [], [], 0, 0, (0, 0)
            for item in chosen:
                tensor, dtype = self.names.index(item.name), self.dtypes[item.name]
                full = self.bits[item.name]
                window = tuple(slice(at, at + n) for at, n in zip(item.offset, item.new.shape, strict=True))
                old = np.ascontiguousarray(full[window]).reshape(-1)
                new = np.ascontiguousarray(item.new).reshape(-1)
                where = np.arange(full.size, dtype=np.uint64).reshape(full.shape)[window].reshape(-1)
                changed = np.flatnonzero(old != new)
                count = new.size if encoding == "dense" else changed.size
                after, earlier = digest(new, where), digest(old, where)
                increments.append(packed((after[0] - earlier[0], after[1] - earlier[1])))
                row = self.box(tensor - before, item.offset, item.new.shape, full.shape)
                rows.append(row + (b"" if encoding == "dense" else varint(count)))
                before = tensor
                changed_total += count
                if encoding == "coo":
                    payload.setdefault("coo.index.u32", []).append(changed.astype("<u4").tobytes())
                    payload.setdefault(f"coo.value.{dtype}", []).append(new[changed].tobytes())
                elif encoding == "dense":
                    payload.setdefault(f"dense.{dtype}", []).append(new.tobytes())
                else:
                    blob.append((old ^ new).tobytes())
                    seen = digest(old[changed], where[changed])
                    check = (check[0] + seen[0], check[1] + seen[1])
                    raw_bytes += new.nbytes
            sizes = b""
            if encoding == "xor":
                stored = packed(check) + zstandard.ZstdCompressor(level=1).compress(b"".join(blob))
                payload.setdefault("xor", []).append(stored)
                sizes = varint(len(stored)) + varint(raw_bytes)
            frames.append(varint(CODE[encoding]) + varint(len(chosen)) + sizes + b"".join(rows))
        widths = {"coo.index.u32": ("U32", 4), "xor": ("U8", 1)}
        tensors = [("increment", "U64", [len(increments), 2], b"".join(increments))]
        table = varint(len(frames)) + b"".join(frames)
        tensors.append(("table", "U8", [len(table)], table))
        for name, pieces in payload.items():
            dtype, width = widths.get(name) or (name.rpartition(".")[2], WIDTH[name.rpartition(".")[2]])
            data = b"".join(pieces)
            tensors.append((name, dtype, [len(data) // width], data))
        order = {"U64": 8, "U32": 4, "U8": 1} | WIDTH
        tensors.sort(key=lambda entry: (-order[entry[1]], entry[0]))
        told = {
            "format_version": [1, 0],
            "stream_id": self.stream_id,
            "version": version,
            "rank": rank,
            "seq": seq,
            **(metadata or {}),
        }
        data = safetensors(tensors, {"torch_delta": json.dumps(told)})
        key = f"parts/{version:020d}/{rank:05d}-{seq:04d}-{secrets.token_hex(8)}.safetensors"
        self.put(key, data)
        return {
            "key": key,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "rank": rank,
            "slices": len(increments),
            "changed": changed_total,
        }

    @staticmethod
    def box(step: int, offset: tuple[int, ...], shape: tuple[int, ...], full: tuple[int, ...]) -> bytes:
        if tuple(shape) == tuple(full):
            return varint(step * 4)
        if tuple(shape[1:]) == tuple(full[1:]):
            return varint(step * 4 + 1) + varint(offset[0]) + varint(shape[0])
        return varint(step * 4 + 2) + b"".join(varint(a) + varint(n) for a, n in zip(offset, shape, strict=True))

    def publish(self, ranks: list[list[Slice]], **overrides: object) -> dict:
        """Commit the next version from each rank's slices; `overrides` replace fields of the commit."""
        version = self.version + 1
        parts = [self.part(version, rank, slices) for rank, slices in enumerate(ranks) if slices]
        for slices in ranks:
            for item in slices:
                window = tuple(slice(at, at + n) for at, n in zip(item.offset, item.new.shape, strict=True))
                self.bits[item.name][window] = item.new
        return self.commit(parts, **overrides)

    def commit(self, parts: list[dict], **overrides: object) -> dict:
        version = self.version + 1
        fields = {
            "format_version": [1, 0],
            "stream_id": self.stream_id,
            "version": version,
            "parent_sha256": self.parents[version - 1],
            "schema": self.schema_id,
            "parts": sorted(parts, key=lambda part: part["key"]),
            "state_sha256": hashlib.sha256(self.digests()).hexdigest(),
            "changed": sum(part["changed"] for part in parts),
            "required_features": [],
            "info": {"writer": "handmade"},
            **overrides,
        }
        stored = sealed(fields)
        self.put(f"commits/{version:020d}.json", stored)
        self.version = version
        self.parents.append(hashlib.sha256(stored).hexdigest())
        self.history.append({name: bits.copy() for name, bits in self.bits.items()})
        self.num_changed.append(fields["changed"])
        head = {"format_version": [1, 0], "stream_id": self.stream_id, "version": version}
        self.put("head.json", sealed({**head, "commit_sha256": self.parents[version]}))
        return fields

    def step(
        self, rng: np.random.Generator, *, density: float = 0.1, encodings: tuple[str, ...] = ("coo", "xor", "dense")
    ) -> dict:
        """Change random elements, spread over two ranks by rows, in random encodings."""
        ranks: list[list[Slice]] = [[], []]
        for name in self.data_names():
            bits = self.bits[name]
            if not bits.size:
                continue
            pieces = [(0, bits)]
            if bits.ndim and bits.shape[0] > 1:
                cut = int(rng.integers(1, bits.shape[0]))
                pieces = [(0, bits[:cut]), (cut, bits[cut:])]
            for rank, (row, piece) in enumerate(pieces):
                noise = rng.integers(1, 2 ** (8 * bits.dtype.itemsize) - 1, piece.shape, dtype=bits.dtype)
                new = np.where(rng.random(piece.shape) < density, piece ^ noise, piece).astype(bits.dtype)
                if np.array_equal(new, piece):
                    continue
                offset = (row, *(0,) * (bits.ndim - 1)) if bits.ndim else ()
                ranks[rank].append(Slice(name, offset, new, str(rng.choice(encodings))))
        return self.publish(ranks)

    def checkpoint(
        self, folder: Path, version: int | None = None, *, num_files: int = 1, with_ties: bool = False
    ) -> Path:
        """Write the state of a version as a checkpoint folder."""
        bits = self.history[self.version if version is None else version]
        folder.mkdir(parents=True, exist_ok=True)
        names = self.data_names() + (sorted(self.ties) if with_ties else [])
        groups = [names[at::num_files] for at in range(num_files)]
        weight_map = {}
        for number, group in enumerate(groups, start=1):
            file = "model.safetensors" if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"
            tensors = []
            for name in group:
                source = self.ties.get(name, name)
                tensors.append((name, self.dtypes[source], list(bits[source].shape), bits[source].tobytes()))
                weight_map[name] = file
            (folder / file).write_bytes(safetensors(tensors, {"format": "pt"}))
        if num_files > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"model_type": "handmade"}))
        return folder

    def anchor(self, version: int | None = None, *, num_files: int = 1, **overrides: object) -> str:
        """Write an anchor of a version; returns the key of its manifest."""
        version = self.version if version is None else version
        nonce = secrets.token_hex(8)
        stem = f"anchors/{version:020d}-{nonce}"
        folder = self.checkpoint(self.root / stem, version, num_files=num_files)
        files, tensor_files = [], {}
        for path in sorted(folder.iterdir()):
            data = path.read_bytes()
            files.append(
                {
                    "name": path.name,
                    "key": f"{stem}/{path.name}",
                    "bytes": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
            )
            if path.suffix == ".safetensors":
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                tensor_files.update({name: path.name for name in header if name != "__metadata__"})
        bits = self.history[version]
        digests = b"".join(packed(digest(bits[name].reshape(-1))) for name in self.data_names())
        fields = {
            "format_version": [1, 0],
            "stream_id": self.stream_id,
            "version": version,
            "commit_sha256": self.parents[version] if self.parents else None,
            "schema": self.schema_id,
            "files": files,
            "tensor_files": tensor_files,
            "digests": digests.hex(),
            "info": {},
            **overrides,
        }
        self.put(f"{stem}.json", sealed(fields))
        return f"{stem}.json"

    def forget(self, first: int, last: int) -> None:
        """Retention: delete commits before their parts."""
        for version in range(first, last + 1):
            (self.root / f"commits/{version:020d}.json").unlink()
            for part in (self.root / f"parts/{version:020d}").glob("*"):
                part.unlink()

    def assert_at(self, folder: Path, version: int) -> None:
        """The weight files in `folder` hold exactly the bits of `version`."""
        found = read_folder(folder)
        for name, source in {**{n: n for n in self.data_names()}, **self.ties}.items():
            if name in self.ties and name not in found:
                continue
            np.testing.assert_array_equal(found[name], self.history[version][source], err_msg=f"{name} at {version}")


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    width = WIDTH[dtype]
    return np.frombuffer(rng.bytes(prod(shape) * width), f"<u{width}").reshape(shape).copy()


def small_trainer(root: Path, seed: int = 0, **options: object) -> Trainer:
    """Tensors of several dtypes and ranks, a scalar, an empty one and a tie."""
    rng = np.random.default_rng(seed)
    dtypes = {
        "embed.weight": "BF16",
        "layer.bias": "F32",
        "layer.count": "I64",
        "layer.empty": "F16",
        "layer.scale": "F8_E4M3",
        "layer.weight": "BF16",
        "layer.experts": "BF16",
    }
    shapes = {
        "embed.weight": (40, 16),
        "layer.bias": (33,),
        "layer.count": (),
        "layer.empty": (0, 4),
        "layer.scale": (5, 7),
        "layer.weight": (64, 24),
        "layer.experts": (4, 6, 10),
    }
    bits = {name: random_bits(rng, dtype, shapes[name]) for name, dtype in dtypes.items()}
    return Trainer(root, dtypes, bits, {"lm_head.weight": "embed.weight"}, **options)
