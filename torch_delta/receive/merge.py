"""Several pending versions as one absolute patch: decoded in order, proved one by one, written once.

    parts of v+1 … v+n, some versions ahead ──► each version: check, decode against the scratch, lay over it
                                                           │ (every increment and every state hash, as for one version)
    weights ──compare──► scratch ──► one patch from v to v+n; elements that went back to their old bits drop out

What is gained over one by one: pages of the weight files are written once, the journal is synced once, readers are kept
out once. What it costs is a copy of every tensor that is touched, so a few versions are cheaper one by one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch_delta.codec.decode import decode_frame
from torch_delta.codec.diff import diff
from torch_delta.crashpoints import reach
from torch_delta.format.box import Box
from torch_delta.format.frames import Frame, Slice
from torch_delta.format.part import parse_part
from torch_delta.receive.fetch import Wanted, fetch_all
from torch_delta.receive.patches import PatchWriter, file_hash
from torch_delta.receive.prepare import Piece, Timings, check_parts, split
from torch_delta.receive.prepared import Prepared
from torch_delta.receive.scratch import Scratch
from torch_delta.receive.workers import run_all

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from concurrent.futures import Future

    from torch_delta.codec.bits import Index
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.receive.session import Session
    from torch_delta.store import Store
    from torch_delta.stream import StoredCommit

_AHEAD_BYTES = 128 << 20  # of parts fetched in one go; two such groups are in memory at a time
_AHEAD_VERSIONS = 32
_DENSE_SHARE = 3  # a whole tensor is cheaper than indices and values from this share of its elements on (1 in 3)


def prepare_merged(
    session: Session,
    store: Store,
    pending: Sequence[StoredCommit],
    pool: ThreadPoolExecutor,
    *,
    absolute_only: bool = False,
) -> tuple[Prepared, Timings]:
    """Fetch and decode versions that follow each other, against the checkpoint of a writer session.

    Args:
        session: of the checkpoint, at the version before the first commit.
        store: of the stream.
        pending: commits in order, each checked as for `prepare`, and each against the one before.
        pool: for parallel downloads.
        absolute_only: what the stream promises of its encodings.

    Raises:
        ObjectNotFound, FormatError, DigestMismatch: as `prepare`; nothing was written.
    """
    state, schema, started_s = session.bound_state(), session.schema, time.perf_counter()
    fetch_s = 0.0
    digests = state.digests
    with (
        Scratch(session.weights, session.layout.tmp) as scratch,
        contextlib.closing(_fetched(store, pending, session, pool)) as groups,
    ):
        while True:
            waited_s = time.perf_counter()
            group = next(groups, None)
            fetch_s += time.perf_counter() - waited_s
            if group is None:
                break
            reach("receive.parts_fetched")
            for found, buffers in group:
                commit = found.commit
                parts = [
                    parse_part(buffer, schema=schema, key=ref.key)
                    for buffer, ref in zip(buffers, commit.parts, strict=True)
                ]
                digests = check_parts(schema, digests, commit, parts, absolute_only=absolute_only)

                def lay_over(piece: Piece) -> None:
                    scratch.write(decode_frame(schema, piece.frame, piece.payload, scratch.read, key=piece.key))

                run_all(session.pool, lay_over, (piece for part in parts for piece in split(schema, part)))
                reach("receive.version_merged")
        prepared = _as_patch(session, scratch, pending, digests)
    return prepared, Timings(
        stored_bytes=sum(part.stored_bytes for found in pending for part in found.commit.parts),
        fetch_s=fetch_s,
        decode_s=time.perf_counter() - started_s - fetch_s,
    )


def _fetched(
    store: Store, pending: Sequence[StoredCommit], session: Session, pool: ThreadPoolExecutor
) -> Generator[list[tuple[StoredCommit, list[memoryview]]]]:
    """The parts of all versions, in order, by groups; the next group is on its way while one is decoded."""

    def fetch(group: Sequence[StoredCommit]) -> list[tuple[StoredCommit, list[memoryview]]]:
        wanted = [Wanted(part.key, part.stored_bytes, part.sha256) for found in group for part in found.commit.parts]
        buffers = iter(fetch_all(store, wanted, session.layout.tmp, pool))
        return [(found, [next(buffers) for _ in found.commit.parts]) for found in group]

    with ThreadPoolExecutor(1, thread_name_prefix="torch-delta-ahead") as ahead:
        coming: Future[list[tuple[StoredCommit, list[memoryview]]]] | None = None
        for group in _groups(pending):
            arrived, coming = coming, ahead.submit(fetch, group)
            if arrived is not None:
                yield arrived.result()
        if coming is not None:
            yield coming.result()


def _groups(pending: Sequence[StoredCommit]) -> Iterator[Sequence[StoredCommit]]:
    first = filled = 0
    for at, found in enumerate(pending):
        size = sum(part.stored_bytes for part in found.commit.parts)
        if at > first and (filled + size > _AHEAD_BYTES or at - first == _AHEAD_VERSIONS):
            yield pending[first:at]
            first, filled = at, 0
        filled += size
    yield pending[first:]


def _as_patch(
    session: Session, scratch: Scratch, pending: Sequence[StoredCommit], digests: tuple[Digest, ...]
) -> Prepared:
    schema, state = session.schema, session.bound_state()
    last = pending[-1]
    increments = {
        tensor: after - before
        for tensor, before, after in zip(schema.data_indices, state.digests, digests, strict=True)
    }
    # Twice over the touched tensors: the file is laid out by counts, and indices of all of them may not fit in memory.
    counts = run_all(session.pool, lambda tensor: _changed(session, scratch, tensor).size, scratch.touched)
    slices = [
        (_is_dense(schema, tensor, count), _slice(schema, tensor, count, increments[tensor]))
        for tensor, count in zip(scratch.touched, counts, strict=True)
        if count
    ]
    frames = [
        Frame(encoding, tuple(item for dense, item in slices if dense == (encoding == "dense")))
        for encoding in ("coo", "dense")
    ]
    path = session.layout.tmp / f"patch-{secrets.token_hex(8)}"
    frames = [frame for frame in frames if frame.slices]
    writer = PatchWriter(path, schema, last.commit.stream_id, last.commit.version, frames)

    def put(item: tuple[bool, Slice]) -> None:
        is_dense, of = item
        flat = scratch.flat(of.tensor)
        if is_dense:
            writer.put(of.tensor, of.box, None, flat)
            return
        index = _changed(session, scratch, of.tensor)
        writer.put(of.tensor, of.box, index, flat[index.astype("<i8", copy=False)])

    try:
        run_all(session.pool, put, slices)
        writer.close()
    except BaseException:
        writer.discard()
        raise
    return Prepared(
        since=state.version,
        version=last.commit.version,
        parent_sha256=pending[0].commit.parent_sha256,
        commit_sha256=last.sha256,
        digests=digests,
        patch=path,
        patch_hash=file_hash(path),
        num_changed=sum(item.count for _, item in slices),
    )


def _changed(session: Session, scratch: Scratch, tensor: int) -> Index:
    return diff(session.weights.flat(tensor), scratch.flat(tensor))


def _is_dense(schema: Schema, tensor: int, count: int) -> bool:
    return count * _DENSE_SHARE >= schema.tensors[tensor].numel


def _slice(schema: Schema, tensor: int, count: int, increment: Digest) -> Slice:
    spec = schema.tensors[tensor]
    numel = spec.numel if _is_dense(schema, tensor, count) else count
    return Slice(tensor, Box((0,) * len(spec.shape), tuple(spec.shape)), numel, increment)
