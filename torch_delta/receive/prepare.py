"""One version, from a commit to an absolute patch that is proved and not yet written.

    fetch parts ──► bytes and sha256 ──► parse ──► every declared thing of every part ──► decode ──► Prepared
                                                   (boxes disjoint, counts, and that the      (each slice's increment
                                                    declared increments lead to the commit's   recomputed from our own
                                                    state hash)                                old bits)

So when a patch exists, its result is proved: old digests plus recomputed increments hash to what the writer committed.
The weight files are only read here. `merge` does the same for several versions at once.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch_delta.codec.decode import decode_frame
from torch_delta.crashpoints import reach
from torch_delta.errors import DigestMismatch, FormatError
from torch_delta.format.digest import Digest, state_sha256
from torch_delta.format.encodings import ENCODINGS
from torch_delta.format.frames import Frame, Slice, check_slices_disjoint
from torch_delta.format.part import Part, parse_part, payload_sizes
from torch_delta.receive.fetch import Wanted, fetch_all
from torch_delta.receive.patches import PatchWriter, file_hash
from torch_delta.receive.prepared import Prepared
from torch_delta.receive.workers import run_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from torch_delta.format.commit import Commit
    from torch_delta.format.schema import Schema
    from torch_delta.receive.session import Session
    from torch_delta.store import Store
    from torch_delta.stream import StoredCommit


_PIECE_ELEMENTS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds and bytes of one preparation."""

    stored_bytes: int
    fetch_s: float
    decode_s: float


def prepare(
    session: Session, store: Store, found: StoredCommit, pool: ThreadPoolExecutor, *, absolute_only: bool = False
) -> tuple[Prepared, Timings]:
    """Fetch and decode one version against the checkpoint of a writer session.

    Args:
        session: of the checkpoint, at the version before the commit.
        store: of the stream.
        found: the commit, checked for seal, stream, schema, version and parent (rule R4).
        pool: for parallel downloads.
        absolute_only: what the stream promises of its encodings.

    Raises:
        ObjectNotFound: a part is gone; plan again.
        FormatError: a part is not what the commit names, or breaks a rule.
        DigestMismatch: the old bits here are not the ones the delta was made from, or the result is not the writer's.
    """
    commit, commit_sha256 = found
    state, schema = session.bound_state(), session.schema
    started_s = time.perf_counter()
    wanted = [Wanted(part.key, part.stored_bytes, part.sha256) for part in commit.parts]
    buffers = fetch_all(store, wanted, session.layout.tmp, pool)
    fetched_s = time.perf_counter()
    reach("receive.parts_fetched")
    parts = [parse_part(buffer, schema=schema, key=item.key) for buffer, item in zip(buffers, wanted, strict=True)]
    digests = check_parts(schema, state.digests, commit, parts, absolute_only=absolute_only)
    prepared = _decode(session, commit, commit_sha256, parts, digests)
    return prepared, Timings(
        stored_bytes=sum(item.stored_bytes for item in wanted),
        fetch_s=fetched_s - started_s,
        decode_s=time.perf_counter() - fetched_s,
    )


def check_parts(
    schema: Schema, before: Sequence[Digest], commit: Commit, parts: Sequence[Part], *, absolute_only: bool = False
) -> tuple[Digest, ...]:
    """Check everything the parts of a version declare, together, before any of it is used (rules P1, P13, R6, C5).

    Args:
        schema: of the stream.
        before: digests of all tensors with data at the version before, in schema order.
        commit: of the version.
        parts: all of them, parsed.
        absolute_only: what the stream promises of its encodings.

    Returns:
        The digests of all tensors after this version, proved to be the committed state if the declared increments are
        right; decoding proves those.
    """
    digests = dict(zip(schema.data_indices, before, strict=True))
    for part, ref in zip(parts, commit.parts, strict=True):
        part.check_reference(ref, commit)
        for frame in part.frames:
            if absolute_only and not ENCODINGS[frame.encoding].absolute:
                raise FormatError(
                    f"{ref.key}: {frame.encoding} in a stream that promises absolute encodings only (rule I5)",
                    rule="I5",
                    key=ref.key,
                )
            for item in frame.slices:
                digests[item.tensor] += item.increment
    check_slices_disjoint([part.frames for part in parts], schema=schema)
    result = tuple(digests[index] for index in schema.data_indices)
    got = state_sha256(result)
    if got != commit.state_sha256:
        raise DigestMismatch(
            f"{commit.key}: its slices lead from version {commit.version - 1} here to state {got}, it promises "
            f"{commit.state_sha256} (rule C5)",
            rule="C5",
            version=commit.version,
            expected=commit.state_sha256,
            got=got,
        )
    return result


class Piece(NamedTuple):
    """A frame, or some slices of one, with their payload."""

    key: str
    frame: Frame
    payload: dict[str, memoryview]


def split(schema: Schema, part: Part) -> Iterator[Piece]:
    """Cut the frames of a part into pieces of bounded size, for memory and threads; `xor` frames are that already."""
    for frame in part.frames:
        payload = part.payload(frame)
        if ENCODINGS[frame.encoding].blob:
            yield Piece(part.key, frame, payload)
            continue
        ends = dict.fromkeys(payload, 0)
        slices: list[Slice] = []
        total = 0
        for number, item in enumerate(frame.slices, start=1):
            slices.append(item)
            total += item.count
            if total < _PIECE_ELEMENTS and number < len(frame.slices):
                continue
            some = Frame(frame.encoding, tuple(slices))
            views = {}
            for name, size in payload_sizes(some, schema).items():
                views[name] = payload[name][ends[name] : ends[name] + size]
                ends[name] += size
            yield Piece(part.key, some, views)
            slices, total = [], 0


def _decode(
    session: Session, commit: Commit, commit_sha256: str, parts: Sequence[Part], digests: tuple[Digest, ...]
) -> Prepared:
    schema, weights = session.schema, session.weights
    path = session.layout.tmp / f"patch-{secrets.token_hex(8)}"
    writer = PatchWriter(path, schema, commit.stream_id, commit.version, (f for part in parts for f in part.frames))

    def decode(piece: Piece) -> None:
        writer.put_all(decode_frame(schema, piece.frame, piece.payload, weights.read, key=piece.key))

    try:
        run_all(session.pool, decode, (piece for part in parts for piece in split(schema, part)))
        writer.close()
    except BaseException:
        writer.discard()
        raise
    return Prepared(
        since=commit.version - 1,
        version=commit.version,
        parent_sha256=commit.parent_sha256,
        commit_sha256=commit_sha256,
        digests=digests,
        patch=path,
        patch_hash=file_hash(path),
        num_changed=commit.num_changed,
    )
