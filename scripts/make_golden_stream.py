"""The golden stream, written from docs/format.md with struct, json and hashlib only: an oracle that shares no code with
the package.

    python scripts/make_golden_stream.py                         # compare the committed files with what this writes
    python scripts/make_golden_stream.py --rewrite stream-v1     # replace them; only with a change of the format

Released streams must stay readable for ever: once a release has written one, a golden stream is added beside the old
one, not put in its place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from math import prod
from pathlib import Path

NAME = "stream-v1"
FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / NAME
STREAM_ID = "5eed" * 8
MASK = 2**64 - 1
WIDTH = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "U32": 4, "I64": 8, "U64": 8, "U8": 1}
CODE = {"coo": 1, "xor": 2, "dense": 3}

# name -> dtype, shape, elements as unsigned integers of the element's width
BASE = {
    "bias": ("F32", [3], [0x3F800000, 0x00000000, 0x7FC00000]),
    "count": ("I64", [], [0xFFFFFFFFFFFFFFFF]),
    "empty": ("F16", [0, 4], []),
    "scale": ("F8_E4M3", [2, 3], [0x38, 0x00, 0x80, 0x7F, 0x40, 0x41]),
    "w": ("BF16", [4, 2], [0x3F80, 0x0000, 0x8000, 0x7FC0, 0x4000, 0x4040, 0x4080, 0x40A0]),
}
ALIASES = {"w_tied": "w"}
NAMES = sorted([*BASE, *ALIASES])


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def digest(dtype: str, elements: dict[int, int]) -> tuple[int, int]:
    """Of the elements given by flat index; all others count as zero. Values may be negative differences."""
    words = {}
    for i, value in elements.items():
        if WIDTH[dtype] == 8:
            words[2 * i], words[2 * i + 1] = value % 2**32, value // 2**32
        else:
            words[i] = value
    lanes = [
        sum(
            (splitmix((lane << 48) + i % 1024) | 1) * (splitmix((2 + lane << 48) + i // 1024) | 1) * w
            for i, w in words.items()
        )
        for lane in (0, 1)
    ]
    return lanes[0] & MASK, lanes[1] & MASK


def digest_bytes(lanes: tuple[int, int]) -> bytes:
    return struct.pack("<QQ", *lanes)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def compact(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def seal(value: dict) -> bytes:
    line = compact(value)
    return line + b"\n" + sha(line).encode() + b"\n"


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def pack(dtype: str, values: list[int]) -> bytes:
    return b"".join(value.to_bytes(WIDTH[dtype], "little") for value in values)


def safetensors(metadata: dict[str, str], tensors: list[tuple[str, str, list[int], bytes]]) -> bytes:
    header, at = {"__metadata__": metadata}, 0
    tensors = sorted(tensors, key=lambda t: (-WIDTH[t[1]], t[0]))
    for name, dtype, shape, data in tensors:
        assert len(data) == prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t[3] for t in tensors)


def zstd_raw(data: bytes) -> bytes:
    """A zstd frame (RFC 8878) with one uncompressed block: single segment, content size in one byte."""
    assert len(data) < 256
    return b"\x28\xb5\x2f\xfd" + b"\x20" + bytes([len(data)]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


def box_elements(shape: list[int], offset: list[int], extent: list[int]) -> list[int]:
    """Flat indices in the full tensor of the elements of a box, row-major."""
    found = [0]
    for full, at, size in zip(shape, offset, extent, strict=True):
        found = [flat * full + at + step for flat in found for step in range(size)]
    return found


def part(
    version: int,
    rank: int,
    state: dict[str, list[int]],
    new: dict[str, list[int]],
    frames: list,
    *,
    base: dict = BASE,
    stream_id: str = STREAM_ID,
) -> bytes:
    """A part from `frames`: [(encoding, [(tensor, offset, extent)])]; what changed in a box is found here."""
    names = sorted([*base, *(ALIASES if base is BASE else {})])
    table, increments, payload = varint(len(frames)), b"", {}
    for encoding, slices in frames:
        rows, raw, previous, check = b"", b"", 0, (0, 0)
        for tensor, offset, extent in slices:
            dtype, shape, _ = base[tensor]
            flat = box_elements(shape, offset, extent)
            changed = [i for i, at in enumerate(flat) if state[tensor][at] != new[tensor][at]]
            schema_index = names.index(tensor)
            kind = 0 if extent == shape else 1 if extent[1:] == shape[1:] else 2
            rows += varint((schema_index - previous) * 4 + kind)
            previous = schema_index
            if kind == 1:
                rows += varint(offset[0]) + varint(extent[0])
            elif kind == 2:
                rows += b"".join(varint(a) + varint(e) for a, e in zip(offset, extent, strict=True))
            if encoding != "dense":
                rows += varint(len(changed))
            before = digest(dtype, {at: state[tensor][at] for at in flat})
            after = digest(dtype, {at: new[tensor][at] for at in flat})
            increments += digest_bytes(tuple((a - b) & MASK for a, b in zip(after, before, strict=True)))
            if encoding == "coo":
                payload.setdefault("coo.index.u32", ["U32", b""])[1] += pack("U32", changed)
                values = payload.setdefault(f"coo.value.{dtype}", [dtype, b""])
                values[1] += pack(dtype, [new[tensor][flat[i]] for i in changed])
            elif encoding == "dense":
                values = payload.setdefault(f"dense.{dtype}", [dtype, b""])
                values[1] += pack(dtype, [new[tensor][at] for at in flat])
            else:
                raw += pack(dtype, [state[tensor][at] ^ new[tensor][at] for at in flat])
                seen = digest(dtype, {flat[i]: state[tensor][flat[i]] for i in changed})
                check = tuple((a + b) & MASK for a, b in zip(check, seen, strict=True))
        table += varint(CODE[encoding]) + varint(len(slices))
        if encoding == "xor":
            blob = digest_bytes(check) + zstd_raw(raw)
            table += varint(len(blob)) + varint(len(raw))
            payload.setdefault("xor", ["U8", b""])[1] += blob
        table += rows
    tensors = [("table", "U8", [len(table)], table), ("increment", "U64", [len(increments) // 16, 2], increments)]
    tensors += [(name, dtype, [len(data) // WIDTH[dtype]], data) for name, (dtype, data) in payload.items()]
    head = {"format_version": [1, 0], "stream_id": stream_id, "version": version, "rank": rank, "seq": 0}
    return safetensors({"torch_delta": compact(head).decode()}, tensors)


def state_sha256(state: dict[str, list[int]], base: dict = BASE) -> str:
    return sha(b"".join(digest_bytes(digest(base[n][0], dict(enumerate(state[n])))) for n in sorted(base)))


def digests_hex(state: dict[str, list[int]], base: dict = BASE) -> str:
    return b"".join(digest_bytes(digest(base[n][0], dict(enumerate(state[n])))) for n in sorted(base)).hex()


def commit(
    version: int, parent: bytes, schema_id: str, parts: list, state_hash: str, *, stream_id: str = STREAM_ID
) -> bytes:
    """`parts`: [(key, bytes, rank, slices, changed)]."""
    return seal(
        {
            "format_version": [1, 0],
            "stream_id": stream_id,
            "version": version,
            "parent_sha256": sha(parent),
            "schema": schema_id,
            "parts": [
                {
                    "key": key,
                    "bytes": len(data),
                    "sha256": sha(data),
                    "rank": rank,
                    "slices": slices,
                    "changed": changed,
                }
                for key, data, rank, slices, changed in parts
            ],
            "state_sha256": state_hash,
            "changed": sum(entry[4] for entry in parts),
            "required_features": [],
            "info": {"writer": "golden"},
        }
    )


def part_name(version: int, rank: int) -> str:
    return f"parts/{version:020d}/{rank:05d}-0000-{version:08x}{rank:08x}.safetensors"


def stream_object(schema_id: str, digests: str, stream_id: str = STREAM_ID) -> bytes:
    return seal(
        {
            "format": "torch-delta",
            "format_version": [1, 0],
            "stream_id": stream_id,
            "schema": schema_id,
            "base": {"kind": "local", "name": "golden base", "revision": None, "digests": digests},
            "required_features": [],
            "absolute_only": False,
            "info": {},
        }
    )


def states() -> list[dict[str, list[int]]]:
    """The elements at versions 0 to 3; version 2 changes nothing."""
    v0 = {name: list(values) for name, (_, _, values) in BASE.items()}
    v1 = {name: list(values) for name, values in v0.items()}
    v1["w"][0], v1["w"][2], v1["w"][7] = 0x3F81, 0x0000, 0x40A1  # 2: -0 becomes 0, which == would miss
    v1["bias"] = [0x3F800001, 0x80000000, 0x7FC00001]  # 2: NaN becomes another NaN
    v1["scale"][4], v1["count"][0] = 0x42, 0x0000000100000000
    v3 = {name: list(values) for name, values in v1.items()}
    v3["w"][1], v3["w"][5] = 0x0001, 0x4041
    v3["count"][0] = 2**63
    return [v0, v1, v1, v3]


def golden() -> dict[str, bytes]:
    """Every object of the golden stream by its key."""
    at = states()
    schema = compact(
        {
            "tensors": [
                {"name": n, "dtype": BASE[ALIASES.get(n, n)][0], "shape": BASE[ALIASES.get(n, n)][1]}
                | ({"alias_of": ALIASES[n]} if n in ALIASES else {})
                for n in NAMES
            ]
        }
    )
    schema_id = sha(schema)
    objects = {f"schema/{schema_id}.json": schema, "stream.json": stream_object(schema_id, digests_hex(at[0]))}
    layout = {
        1: {
            0: [("dense", [("bias", [0], [3])]), ("coo", [("w", [0, 0], [2, 2])])],
            1: [("coo", [("w", [2, 0], [2, 2])]), ("xor", [("count", [], []), ("scale", [0, 0], [2, 3])])],
        },
        2: {},
        3: {0: [("xor", [("w", [0, 1], [4, 1])])], 1: [("coo", [("count", [], [])])]},
    }
    counts = {(1, 0): (2, 5), (1, 1): (3, 3), (3, 0): (1, 2), (3, 1): (1, 1)}
    parent = objects["stream.json"]
    for version, ranks in layout.items():
        parts = []
        for rank, frames in ranks.items():
            key = part_name(version, rank)
            objects[key] = part(version, rank, at[version - 1], at[version], frames)
            parts.append((key, objects[key], rank, *counts[version, rank]))
        parent = commit(version, parent, schema_id, parts, state_sha256(at[version]))
        objects[f"commits/{version:020d}.json"] = parent
    objects |= anchor(2, objects[f"commits/{2:020d}.json"], schema_id, at[2])
    objects["head.json"] = seal(
        {"format_version": [1, 0], "stream_id": STREAM_ID, "version": 3, "commit_sha256": sha(parent)}
    )
    return objects


def anchor(version: int, commit_bytes: bytes, schema_id: str, state: dict[str, list[int]]) -> dict[str, bytes]:
    """A checkpoint folder with an upper-case file name, and its manifest."""
    stem = f"anchors/{version:020d}-{0xA:016x}"
    files = {
        "README.md": b"golden\n",
        "config.json": b'{"model_type":"golden"}\n',
        "model.safetensors": safetensors(
            {"format": "pt"}, [(n, BASE[n][0], BASE[n][1], pack(BASE[n][0], state[n])) for n in sorted(BASE)]
        ),
    }
    manifest = seal(
        {
            "format_version": [1, 0],
            "stream_id": STREAM_ID,
            "version": version,
            "commit_sha256": sha(commit_bytes),
            "schema": schema_id,
            "files": [
                {"name": name, "key": f"{stem}/{name}", "bytes": len(data), "sha256": sha(data)}
                for name, data in sorted(files.items())
            ],
            "tensor_files": dict.fromkeys(sorted(BASE), "model.safetensors"),
            "digests": digests_hex(state),
            "info": {},
        }
    )
    return {f"{stem}/{name}": data for name, data in files.items()} | {f"{stem}.json": manifest}


def example() -> dict[str, bytes]:
    """The worked example of docs/format.md: one tensor, one version, two ranks."""
    base = {"w": BASE["w"]}
    old, new = ({"w": state["w"]} for state in states()[:2])
    schema = compact({"tensors": [{"name": "w", "dtype": "BF16", "shape": [4, 2]}]})
    stream = stream_object(sha(schema), digests_hex(old, base), "0" * 32)
    objects = {f"schema/{sha(schema)}.json": schema, "stream.json": stream}
    parts = []
    for rank, changed in ((0, 2), (1, 1)):
        key, frames = part_name(1, rank), [("coo", [("w", [2 * rank, 0], [2, 2])])]
        objects[key] = part(1, rank, old, new, frames, base=base, stream_id="0" * 32)
        parts.append((key, objects[key], rank, 1, changed))
    objects[f"commits/{1:020d}.json"] = commit(
        1, stream, sha(schema), parts, state_sha256(new, base), stream_id="0" * 32
    )
    return objects


def differences(folder: Path, objects: dict[str, bytes]) -> list[str]:
    """Keys that are missing, extra or different in `folder`."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return sorted(key for key in found.keys() | objects.keys() if found.get(key) != objects.get(key))


def main(argv: list[str] | None = None, folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rewrite", metavar="NAME", help=f"replace the committed files; NAME must be {NAME!r}, exactly"
    )
    args = parser.parse_args(argv)
    objects = golden()
    different = differences(folder, objects)
    if args.rewrite is None:
        print(f"{folder}: {len(different)} of {len(objects)} objects differ", *different, sep="\n  ")
        return 1 if different else 0
    if args.rewrite != NAME:
        print(f"nothing was written: --rewrite takes exactly {NAME!r}, got {args.rewrite!r}", file=sys.stderr)
        return 2
    for key in different:
        path = folder / key
        if key in objects:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(objects[key])
        else:
            path.unlink()
    print(f"{folder}: {len(different)} objects rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
