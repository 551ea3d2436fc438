"""A trainer that starts again: where in the stream, or in the line of streams, do its weights stand?

at the newest version      the stream goes on
at an older one            that version is forked: what came after it belongs to a history that is given up
at none of them            the trainer's checkpoint is ahead of the last commit, or of another run: a fork at an anchor

A fork is a new stream beside the old one, which a successor object ends: its writer, should it still live, is fenced,
and followers go over by themselves. Digests decide, never version numbers, so another mesh makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import BaseMismatch, ChainError, FormatError, ObjectNotFound
from torch_delta.format.digest import state_sha256
from torch_delta.format.head import Successor
from torch_delta.publish.progress import Lineage
from torch_delta.stream.lineages import walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.config import PublishConfig
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.stream.stream import Stream

_SHOWN = 8
_MOST_LOOKED_AT = 10_000  # commits, newest first, that are compared with the state of a trainer that starts again


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A version of a stream, as far as a writer must know it."""

    version: int
    commit_sha256: str
    """Of its commit; of stream.json for version 0."""
    state_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a trainer's weights stand in a stream."""

    stream: Stream
    roots: tuple[str, ...]
    """From the URL that was attached to, the siblings that lead to `stream`."""
    head: Place
    at: Place | None
    """The newest version with these weights, or None."""

    @property
    def is_head(self) -> bool:
        """Whether the stream simply goes on."""
        return self.at is not None and self.at.version == self.head.version

    def lineage(self, schema: Schema, digests: Sequence[Digest]) -> Lineage:
        """What a committer starts from; for a trainer that stands at the head."""
        self.stream.adopt(self.head.version, self.head.commit_sha256)
        return Lineage(
            stream=self.stream,
            stream_id=self.stream.load()[0].stream_id,
            schema=schema,
            version=self.head.version,
            parent_sha256=self.head.commit_sha256,
            digests=list(digests),
        )

    def successor(self, root: str, successor_id: str) -> Successor:
        """The object that ends the stream in favour of the one at `root`."""
        fork = self.at if self.at is not None else self.head
        return Successor(
            stream_id=self.stream.load()[0].stream_id,
            version=fork.version,
            commit_sha256=fork.commit_sha256,
            root=root,
            successor_id=successor_id,
            info={"writer": "torch_delta"},
        )


def stand(stream: Stream, schema: Schema, digests: Sequence[Digest], config: PublishConfig) -> Standing:
    """Find the place of a trainer's weights in a stream that exists, or in what continues it.

    Args:
        stream: at the URL that was attached to.
        schema: of the trainer.
        digests: of all tensors with data, over all ranks, in schema order.
        config: of the publisher.

    Raises:
        BaseMismatch: a stream of other tensors; one that promises absolute encodings when this writer does not.
        ChainError, FormatError: the stream is damaged where it matters.
        StoreUnavailable: no clear answer.
    """
    roots: list[str] = []
    for lineage in walk(stream):
        if lineage.root is not None:
            roots.append(lineage.root)
            if stream is not lineage.stream and len(roots) > 1:
                stream.store.close()
        stream = lineage.stream
    _check_kind(stream, schema, config)
    head = place(stream, stream.head())
    wanted = state_sha256(digests)
    return Standing(stream=stream, roots=tuple(roots), head=head, at=_find(stream, head, wanted))


def refuse(standing: Standing, schema: Schema, digests: Sequence[Digest]) -> BaseMismatch:
    """The error of a trainer that stands elsewhere and may not fork."""
    url, info = standing.stream.store.url, standing.stream.load()[0]
    version, got = standing.head.version, state_sha256(digests)
    changed = differing(schema, digests, info.base.digests) if version == 0 else []
    named = f" in {len(changed)} tensors ({', '.join(changed[:_SHOWN])})" if changed else ""
    place_told = "" if standing.at is None else f", which are those of version {standing.at.version}"
    return BaseMismatch(
        f"{url} stands at version {version} with other weights than the model's{named}{place_told}: expected state "
        f"{standing.head.state_sha256[:12]}, got {got[:12]}; publish to a new URL, attach with the weights the stream "
        "ends at (`torch-delta pull` writes them as a checkpoint), or let the writer start a new lineage "
        "(on_restart='fork')",
        url=url,
        version=version,
        expected=standing.head.state_sha256,
        got=got,
        tensors=changed[:100],
    )


def differing(schema: Schema, digests: Sequence[Digest], expected: Sequence[Digest]) -> list[str]:
    """Names of the tensors whose digests differ."""
    return [
        schema.tensors[tensor].name
        for tensor, mine, theirs in zip(schema.data_indices, digests, expected, strict=True)
        if mine != theirs
    ]


def place(stream: Stream, version: int) -> Place:
    """What a version is, from its commit, or from an anchor of it where retention removed the commit.

    Raises:
        ChainError: neither is there.
    """
    info, _ = stream.load()
    if version == 0:
        return Place(version=0, commit_sha256=stream.info_sha256, state_sha256=state_sha256(info.base.digests))
    found = stream.find_commit(version)
    if found is not None:
        return Place(version=version, commit_sha256=found.sha256, state_sha256=found.commit.state_sha256)
    for anchor in stream.anchors():
        if anchor.version != version:
            continue
        try:
            manifest = stream.anchor(anchor)
        except (FormatError, ObjectNotFound):
            continue
        if manifest.commit_sha256 is not None:
            return Place(
                version=version,
                commit_sha256=manifest.commit_sha256,
                state_sha256=state_sha256(manifest.digests),
            )
    raise ChainError(
        f"{stream.store.url}: neither the commit nor an anchor of version {version}, its newest, can be read; publish "
        "to a new URL",
        target=version,
        missing=version,
    )


def _find(stream: Stream, head: Place, wanted: str) -> Place | None:
    """The newest version in this state, of those the store still has."""
    if head.state_sha256 == wanted:
        return head
    for version in range(head.version - 1, max(0, head.version - _MOST_LOOKED_AT), -1):
        found = stream.find_commit(version)
        if found is None:
            break
        if found.commit.state_sha256 == wanted:
            return Place(version=version, commit_sha256=found.sha256, state_sha256=wanted)
    start = place(stream, 0)
    return start if start.state_sha256 == wanted else None


def _check_kind(stream: Stream, schema: Schema, config: PublishConfig) -> None:
    info, theirs = stream.load()
    url = stream.store.url
    if theirs.id != schema.id:
        raise BaseMismatch(
            f"{url} holds a stream of other tensors (schema {theirs.id[:12]}, ours {schema.id[:12]}); publish to a new "
            "URL",
            url=url,
            expected=theirs.id,
            got=schema.id,
        )
    if info.absolute_only and not config.absolute_only:
        raise BaseMismatch(
            f"{url} was declared absolute-only and its receivers rely on it; set absolute_only=True", url=url
        )
