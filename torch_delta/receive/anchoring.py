"""An anchor built off the trainer: a follower's own working copy, uploaded as a full copy of the version it is at.

It costs the trainer nothing. The working copy was proved version by version, is digested in full here, and is held
still while it is read; the manifest comes last, so that a crash leaves files that retention sweeps and no anchor.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch_delta.errors import BaseMismatch, ChainError
from torch_delta.format.anchor import AnchorFile, AnchorManifest
from torch_delta.format.keys import anchor_file_key, is_file_name, new_nonce
from torch_delta.receive.diskio import local_io
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.proofs import check_fit, check_rest, wrong_tensors
from torch_delta.receive.weights import Weights
from torch_delta.stream.reuse import Reuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch_delta.receive.local_checkpoint import LocalCheckpoint
    from torch_delta.receive.state import State
    from torch_delta.stream import Stream

_BLOCK_BYTES = 8 << 20
_MAX_SMALL_BYTES = 256 << 20
_SMALL_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})


def upload_anchor(
    checkpoint: LocalCheckpoint,
    stream: Stream,
    *,
    timeout_s: float | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> AnchorManifest:
    """Write an anchor of the version a checkpoint is at. Followers of this host wait meanwhile to write to it.

    Args:
        checkpoint: that follows the stream; all its files beside the weights that a loader needs go along.
        stream: that it follows.
        timeout_s: for a writer of the checkpoint to finish.
        on_bytes: told the bytes of each block that was uploaded.

    Raises:
        BaseMismatch: the checkpoint follows another stream, or holds tensors that this one does not know.
        ChainError: the stream's commit of that version is not the one the checkpoint has.
        DigestMismatch: bytes at rest are not that version; nothing was written.
        StoreUnavailable: no clear answer; what was uploaded is swept by retention.
    """
    info, schema = stream.load()
    with checkpoint.reading(timeout_s=timeout_s) as path:
        state = checkpoint._bound_state()
        if state.stream_id != info.stream_id:
            raise BaseMismatch(
                f"{path} follows stream {state.stream_id}, {stream.store.url} is stream {info.stream_id}",
                path=str(path),
                expected=info.stream_id,
                got=state.stream_id,
            )
        _check_history(stream, state)
        folder = SafetensorsFolder.open(path)
        check_fit(folder, schema, ())
        with Weights(folder, schema, writable=False) as weights, ThreadPoolExecutor(4) as pool:
            check_rest(path, state, wrong_tensors(weights, schema, state.digests, pool))
        nonce = new_nonce()
        reuse = Reuse(stream, state.version, nonce)
        names = (schema.tensors[index].name for index in schema.data_indices)
        digests = dict(zip(names, state.digests, strict=True))
        files = []
        for name in sorted({*folder.files, *_small_files(path)}):
            inside = {n: d for n, d in digests.items() if folder.tensors[n].file == name}
            taken = reuse.weights(name, inside) if inside else _small(reuse, path / name)
            if taken is not None:
                on_bytes(taken.stored_bytes)
            files.append(taken or _upload(stream, path / name, anchor_file_key(state.version, nonce, name), on_bytes))
    manifest = AnchorManifest(
        stream_id=info.stream_id,
        version=state.version,
        commit_sha256=state.commit_sha256,
        schema_id=schema.id,
        files=tuple(files),
        tensor_files={schema.tensors[i].name: folder.tensors[schema.tensors[i].name].file for i in schema.data_indices},
        digests=state.digests,
        info={"writer": "torch_delta", "built": "by a follower"},
    )
    stream.write_anchor(manifest)
    return manifest


def _check_history(stream: Stream, state: State) -> None:
    found = stream.find_commit(state.version) if state.version else None
    if found is not None and found.sha256 != state.commit_sha256:
        raise ChainError(
            f"{stream.store.url}: version {state.version} is another commit than the one this checkpoint is at",
            target=state.version,
            expected=state.commit_sha256,
            got=found.sha256,
        )


def _small_files(path: Path) -> Iterator[str]:
    for entry in path.iterdir():
        if (
            entry.suffix in _SMALL_SUFFIXES
            and is_file_name(entry.name)
            and entry.is_file()
            and entry.stat().st_size <= _MAX_SMALL_BYTES
        ):
            yield entry.name


def _small(reuse: Reuse, path: Path) -> AnchorFile | None:
    with local_io(path, "read a file of the anchor"):
        data = path.read_bytes()
    return reuse.small(path.name, len(data), hashlib.sha256(data).hexdigest())


def _upload(stream: Stream, source: Path, key: str, on_bytes: Callable[[int], object]) -> AnchorFile:
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        with local_io(source, "read a file of the anchor"), source.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
                on_bytes(len(block))
                yield block

    stored = stream.store.put_new(key, blocks())
    return AnchorFile(name=source.name, key=key, stored_bytes=stored.size_bytes, sha256=digest.hexdigest())
