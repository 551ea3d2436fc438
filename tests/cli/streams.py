"""Small streams written with the format package alone, so that the command line can be tested without a trainer."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_delta.format.anchor import AnchorFile, AnchorManifest
from torch_delta.format.box import Box
from torch_delta.format.commit import Commit, PartRef
from torch_delta.format.digest import Digest, digest_words, state_sha256
from torch_delta.format.keys import anchor_file_key, part_key
from torch_delta.format.part import Frame, PartHeader, Slice, encode_part
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.format.sealed import sha256_hex
from torch_delta.format.streaminfo import BaseInfo, StreamInfo
from torch_delta.store import open_store
from torch_delta.stream import Stream

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = Schema(
    (
        TensorSpec("a.weight", "BF16", (4, 8)),
        TensorSpec("b.bias", "F32", (3,)),
        TensorSpec("tied.weight", "BF16", (4, 8), alias_of="a.weight"),
    )
)
STREAM_ID = "0123456789abcdef" * 2
NONCE = "00ff00ff00ff00ff"
_WORD = {"BF16": "H", "F32": "I"}

State = dict[str, list[int]]
Changes = dict[str, dict[int, int]]


def base_state() -> State:
    return {"a.weight": [0x3F80 + index for index in range(32)], "b.bias": [0x3F800000, 0, 0x80000000]}


def digests(state: State) -> tuple[Digest, ...]:
    return tuple(digest_words(state[name]) for name in ("a.weight", "b.bias"))


class StreamMaker:
    """Writes versions one by one; two ranks own two rows each of `a.weight`, rank 0 owns `b.bias`."""

    def __init__(self, root: Path, *, stream_id: str = STREAM_ID) -> None:
        self.root = root
        self.stream_id = stream_id
        self.store = open_store(root)
        self.stream = Stream(self.store)
        self.state = base_state()
        self.version = 0
        base = BaseInfo(kind="local", name="tiny", revision=None, digests=digests(self.state))
        self.stream.create(StreamInfo(stream_id=self.stream_id, schema_id=SCHEMA.id, base=base), SCHEMA)
        self.parent = self.stream.info_sha256

    def publish(self, changes: Changes, *, hint: bool = True, **broken: object) -> Commit:
        """Commit a version that sets elements to new bits; `broken` fields replace those of the honest commit."""
        self.version += 1
        parts = []
        for rank in (0, 1):
            slices, indices, values = [], [], {"BF16": b"", "F32": b""}
            for name, box in (("a.weight", Box((2 * rank, 0), (2, 8))), ("b.bias", Box((0,), (3,)))):
                start = 16 * rank if name == "a.weight" else 0
                own = {i: new for i, new in sorted(changes.get(name, {}).items()) if start <= i < start + box.numel}
                if not own or (name == "b.bias" and rank == 1):
                    continue
                spec = SCHEMA.by_name[name]
                increment = Digest.ZERO
                for index, new in own.items():
                    increment += digest_words([new], index) - digest_words([self.state[name][index]], index)
                    self.state[name][index] = new
                slices.append(Slice(SCHEMA.index(name), box, len(own), increment))
                indices += [index - start for index in own]
                values[spec.dtype] += struct.pack(f"<{len(own)}{_WORD[spec.dtype]}", *own.values())
            if slices:
                parts.append(self._put(rank, Frame("coo", tuple(slices)), indices, values))
        commit = Commit(
            stream_id=self.stream_id,
            version=self.version,
            parent_sha256=self.parent,
            schema_id=SCHEMA.id,
            parts=tuple(parts),
            state_sha256=state_sha256(digests(self.state)),
            num_changed=sum(part.num_changed for part in parts),
            info={"step": str(10 * self.version), "nonce": NONCE},
        )
        commit = replace(commit, **broken)
        self.store.put_new(commit.key, commit.to_bytes())
        self.parent = sha256_hex(commit.to_bytes())
        if hint:
            self.stream.write_head(self.version, self.parent)
        return commit

    def _put(self, rank: int, frame: Frame, indices: list[int], values: dict[str, bytes]) -> PartRef:
        payload = {"coo.index.u32": struct.pack(f"<{len(indices)}I", *indices)}
        payload |= {f"coo.value.{dtype}": data for dtype, data in values.items() if data}
        header = PartHeader(stream_id=self.stream_id, version=self.version, rank=rank, seq=0)
        data = b"".join(bytes(piece) for piece in encode_part(header, [frame], [payload], schema=SCHEMA))
        key = part_key(self.version, rank, 0, NONCE)
        self.store.put_new(key, data)
        return PartRef(
            key=key,
            stored_bytes=len(data),
            sha256=sha256_hex(data),
            rank=rank,
            num_slices=len(frame.slices),
            num_changed=sum(item.count for item in frame.slices),
        )

    def anchor(self, *, state: State | None = None) -> AnchorManifest:
        """A full copy of the newest version, or of another state that is passed off as it."""
        state = self.state if state is None else state
        data = checkpoint_bytes(state)
        key = anchor_file_key(self.version, NONCE, "model.safetensors")
        self.store.put_new(key, data)
        manifest = AnchorManifest(
            stream_id=self.stream_id,
            version=self.version,
            commit_sha256=self.parent,
            schema_id=SCHEMA.id,
            files=(AnchorFile(name="model.safetensors", key=key, stored_bytes=len(data), sha256=sha256_hex(data)),),
            tensor_files={"a.weight": "model.safetensors", "b.bias": "model.safetensors"},
            digests=digests(state),
        )
        self.stream.write_anchor(manifest)
        return manifest


def checkpoint_bytes(state: State) -> bytes:
    """A safetensors file of a state."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name in ("b.bias", "a.weight"):
        spec = SCHEMA.by_name[name]
        piece = struct.pack(f"<{spec.numel}{_WORD[spec.dtype]}", *state[name])
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(folder: Path, state: State) -> Path:
    """A checkpoint folder that holds a state."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(checkpoint_bytes(state))
    return folder


def three_versions(root: Path) -> StreamMaker:
    """A whole stream: both ranks, then one, then nothing changed."""
    maker = StreamMaker(root)
    maker.publish({"a.weight": {0: 7, 31: 8}, "b.bias": {2: 9}})
    maker.publish({"a.weight": {1: 0x8000}})
    maker.publish({})
    return maker
