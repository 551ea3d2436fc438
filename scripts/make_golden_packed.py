"""The golden stream with `packed` frames, written from docs/format.md with the standard library only.

    python scripts/make_golden_packed.py                     # compare the committed files with what this writes
    python scripts/make_golden_packed.py --rewrite           # replace them; only with a change of the format

A companion of `make_golden_stream.py`, whose stream has none of the later encodings and stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import make_golden_stream as plain
from scripts.make_golden_stream import WIDTH, box_elements, compact, digest, digest_bytes, seal, sha, varint

NAME = "stream-v1-packed"
FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / NAME
STREAM_ID = "facade00" * 4
STREAMS = ("head", "high0", "high", "high_rest", "mask", "sign", "size", "size_rest", "low")
ORDER = {
    "BF16": (7, 8, True),
    "F16": (10, 5, True),
    "F32": (23, 8, True),
    "F64": (52, 11, True),
    "F8_E5M2": (2, 5, True),
    "F8_E4M3": (3, 4, True),
    "F8_E8M0": (0, 8, False),
}
"""dtype -> bits below the exponent, bits of the exponent, whether elements are sign and magnitude."""
MASK_MODE = 31


@dataclass
class Piece:
    """A slice to encode: old bits of the box, new bits by position in it, and how to write it."""

    dtype: str
    width: int
    old: list[int]
    new: dict[int, int]
    boundary: int | None = None
    modes: dict[int, int] = field(default_factory=dict)
    """Mode by class; a mask where not given."""


def ordered(u: int, width: int, signed: bool) -> int:
    top = 1 << (8 * width - 1)
    return u ^ (top - 1) if signed and u & top else u


def class_of(u: int, dtype: str, boundary: int | None) -> int:
    if boundary is None:
        return 0
    shift, num_bits, _ = ORDER[dtype]
    return min(max((u >> shift) % 2**num_bits - boundary, 0), 7)


def from_bits(bits: list[int]) -> bytes:
    bits = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8))


def streams(pieces: list[Piece]) -> dict[str, bytes]:
    """The nine streams of a frame."""
    out = {name: bytearray() for name in STREAMS}
    strings: dict[str, list[int]] = {name: [] for name in ("mask", "sign", "size", "low")}
    for piece in pieces:
        classes = [class_of(u, piece.dtype, piece.boundary) for u in piece.old]
        numbers = [0 if piece.boundary is None else piece.boundary + 1]
        last, left = (0 if piece.boundary is None else 7), len(piece.new)
        for c in range(last + 1):
            if not left:
                break
            members = [i for i, number in enumerate(classes) if number == c]
            changed = [i for i in members if i in piece.new]
            left -= len(changed)
            if c < last:
                numbers.append(len(changed))
            if not changed:
                continue
            mode = piece.modes.get(c, MASK_MODE)
            numbers += [mode, len(members)] if mode == MASK_MODE else [mode]
            if mode == MASK_MODE:
                strings["mask"] += [int(i in piece.new) for i in members]
            else:
                ranks = [members.index(i) for i in changed]
                for before, rank in zip([-1, *ranks], ranks, strict=False):
                    _gap(rank - before - 1, mode, out, strings["low"])
            for i in changed:
                _step(piece, i, out["size_rest"], strings)
        out["head"] += b"".join(map(varint, numbers))
    return {name: from_bits(strings[name]) if name in strings else bytes(data) for name, data in out.items()}


def _gap(gap: int, shift: int, out: dict[str, bytearray], low: list[int]) -> None:
    out["high" if shift else "high0"].append(min(gap >> shift, 255))
    if gap >> shift >= 255:
        out["high_rest"] += varint((gap >> shift) - 255)
    low += [gap >> i & 1 for i in range(shift)]


def _step(piece: Piece, i: int, size_rest: bytearray, strings: dict[str, list[int]]) -> None:
    signed = ORDER.get(piece.dtype, (0, 0, False))[2]
    full = 1 << 8 * piece.width
    step = (ordered(piece.new[i], piece.width, signed) - ordered(piece.old[i], piece.width, signed)) % full
    step -= full if step >= full // 2 else 0
    excess = abs(step) - 1
    strings["sign"].append(int(step < 0))
    strings["size"] += [min(excess, 3) & 1, min(excess, 3) >> 1]
    if excess >= 3:
        size_rest += varint(excess - 3)


def blob(check: bytes, content: dict[str, bytes], zstd: dict[str, bytes] | None = None) -> bytes:
    """A frame; `zstd` has the stored bytes of streams that are compressed."""
    directory, stored = b"", b""
    for name in STREAMS:
        data = content[name]
        packed = (zstd or {}).get(name)
        directory += varint(2 * len(data)) if packed is None else varint(2 * len(data) + 1) + varint(len(packed))
        stored += data if packed is None else packed
    return check + directory + stored


BASE = {
    "block": ("BF16", [24, 8]),
    "count": ("I64", []),
    "scale": ("F8_E4M3", [5]),
    "zero": ("F32", [3]),
}


def states() -> list[dict[str, list[int]]]:
    """The elements at versions 0 to 2."""
    noise = [plain.splitmix(i) for i in range(192)]
    v0 = {
        "block": [(112 + n % 5 << 7 | n >> 8 & 127 | (n >> 20 & 1) << 15) for n in noise],
        "count": [2**63 - 1],
        "scale": [0x38, 0x00, 0x80, 0x7F, 0x40],
        "zero": [0x80000000, 0x7FC00000, 0x3F800000],
    }
    v1 = {name: list(values) for name, values in v0.items()}
    for i, n in enumerate(noise):
        if n >> 32 & 255 < 200 >> (v0["block"][i] >> 7) % 8:
            v1["block"][i] ^= 1 if n >> 40 & 7 else 0x0155
    v1["count"], v1["scale"][4], v1["zero"] = [2**63], 0x41, [0, 0x7FC00001, 0x3F800000]
    v2 = {name: list(values) for name, values in v1.items()}
    v2["block"] = [u ^ 0x8000 if i % 3 else u + 1 for i, u in enumerate(v1["block"])]
    v2["scale"] = [0x39, 0x80, 0x00, 0xFF, 0xC1]
    return [v0, v1, v2]


LAYOUT = {
    1: {
        0: [("block", [0, 0], [10, 8], 112, {0: 0, 1: 1, 2: 2}), ("count", [], [], None, {0: 0})],
        1: [
            ("block", [10, 0], [14, 8], None, {0: 2}),
            ("scale", [0], [5], 7, {1: 0}),
            ("zero", [0], [3], None, {}),
        ],
    },
    2: {
        0: [("block", [0, 0], [24, 5], None, {})],
        1: [("block", [0, 5], [24, 3], 113, {}), ("scale", [0], [5], 0, {c: c for c in range(8)})],
    },
}
"""version -> rank -> slices of its one frame: tensor, offset, extent, boundary, modes."""


def part(version: int, rank: int, old: dict[str, list[int]], new: dict[str, list[int]]) -> tuple[bytes, int, int]:
    """A part with one packed frame; also how many slices it has and elements it sets."""
    names = sorted(BASE)
    rows, increments, check, raw, previous, total = b"", b"", (0, 0), 0, 0, 0
    pieces = []
    for name, offset, extent, boundary, modes in LAYOUT[version][rank]:
        dtype, shape = BASE[name]
        flat = box_elements(shape, offset, extent)
        changed = {i: new[name][at] for i, at in enumerate(flat) if old[name][at] != new[name][at]}
        pieces.append(Piece(dtype, WIDTH[dtype], [old[name][at] for at in flat], changed, boundary, modes))
        kind = 0 if extent == shape else 1 if extent[1:] == shape[1:] else 2
        rows += varint((names.index(name) - previous) * 4 + kind)
        previous = names.index(name)
        if kind:
            pairs = zip(offset, extent, strict=True) if kind == 2 else [(offset[0], extent[0])]
            rows += b"".join(varint(at) + varint(size) for at, size in pairs)
        rows += varint(len(changed))
        before = digest(dtype, {flat[i]: old[name][flat[i]] for i in changed})
        after = digest(dtype, {flat[i]: value for i, value in changed.items()})
        increments += digest_bytes(tuple((a - b) & plain.MASK for a, b in zip(after, before, strict=True)))
        check = tuple((a + b) & plain.MASK for a, b in zip(check, before, strict=True))
        raw += len(flat) * WIDTH[dtype]
        total += len(changed)
    content = streams(pieces)
    stored = blob(digest_bytes(check), content, {"head": plain.zstd_raw(content["head"])} if rank else None)
    table = varint(1) + varint(4) + varint(len(pieces)) + varint(len(stored)) + varint(raw) + rows
    metadata = {"format_version": [1, 0], "stream_id": STREAM_ID, "version": version, "rank": rank, "seq": 0}
    data = plain.safetensors(
        {"torch_delta": compact(metadata).decode()},
        [
            ("table", "U8", [len(table)], table),
            ("increment", "U64", [len(pieces), 2], increments),
            ("packed", "U8", [len(stored)], stored),
        ],
    )
    return data, len(pieces), total


def _digests(state: dict[str, list[int]]) -> bytes:
    return b"".join(digest_bytes(digest(BASE[name][0], dict(enumerate(state[name])))) for name in sorted(BASE))


def golden() -> dict[str, bytes]:
    """Every object of the golden stream by its key."""
    at = states()
    schema = compact({"tensors": [{"name": n, "dtype": BASE[n][0], "shape": BASE[n][1]} for n in sorted(BASE)]})
    info = {
        "format": "torch-delta",
        "format_version": [1, 0],
        "stream_id": STREAM_ID,
        "schema": sha(schema),
        "base": {"kind": "local", "name": "golden base", "revision": None, "digests": _digests(at[0]).hex()},
        "required_features": ["packed"],
        "absolute_only": False,
        "info": {},
    }
    objects = {f"schema/{sha(schema)}.json": schema, "stream.json": seal(info)}
    parent = objects["stream.json"]
    for version, ranks in LAYOUT.items():
        parts = []
        for rank in ranks:
            key = plain.part_name(version, rank)
            objects[key], num_slices, num_changed = part(version, rank, at[version - 1], at[version])
            parts.append(
                {
                    "key": key,
                    "bytes": len(objects[key]),
                    "sha256": sha(objects[key]),
                    "rank": rank,
                    "slices": num_slices,
                    "changed": num_changed,
                }
            )
        parent = seal(
            {
                "format_version": [1, 0],
                "stream_id": STREAM_ID,
                "version": version,
                "parent_sha256": sha(parent),
                "schema": sha(schema),
                "parts": parts,
                "state_sha256": sha(_digests(at[version])),
                "changed": sum(entry["changed"] for entry in parts),
                "required_features": ["packed"],
                "info": {"writer": "golden"},
            }
        )
        objects[f"commits/{version:020d}.json"] = parent
    return objects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rewrite", action="store_true", help="replace the committed files")
    rewrite = parser.parse_args().rewrite
    expected = golden()
    stored = {str(path.relative_to(FOLDER)): path for path in FOLDER.rglob("*") if path.is_file()}
    if rewrite:
        for path in stored.values():
            path.unlink()
        for key, data in expected.items():
            (FOLDER / key).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / key).write_bytes(data)
        return 0
    different = sorted(
        key for key in {*stored, *expected} if key not in stored or stored[key].read_bytes() != expected.get(key)
    )
    for key in different:
        print(f"differs: {key}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
