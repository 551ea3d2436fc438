"""What a writer and a reader of a stream share: its identity, its commits and anchors, and where its end is.

    stream = Stream(open_store(url))
    stream.create(info, schema)                      # once, by the writer of a new stream
    info, schema = stream.load()
    version = stream.head()                          # the newest version; stream.head(version) asks for what came since
    commit, sha256 = stream.commit(version)          # verified: seal, stream, version, schema, parent

This layer moves small objects only; parts and anchor files go through the store. The one line that makes a version
visible is the `create_or_same` in `write_commit`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from torch_delta.crashpoints import reach
from torch_delta.errors import ChainError, Fenced, ObjectExists, ObjectNotFound
from torch_delta.format.anchor import AnchorManifest
from torch_delta.format.chain import check_parent
from torch_delta.format.checks import broken
from torch_delta.format.commit import Commit
from torch_delta.format.head import Head, Successor
from torch_delta.format.keys import HEAD_KEY, SUCCESSOR_KEY, AnchorKey, anchor_key, commit_key
from torch_delta.format.limits import MAX_HINT_BYTES
from torch_delta.format.sealed import sha256_hex
from torch_delta.stream.ends import find_head, last_run, list_anchors, list_versions
from torch_delta.stream.fence import refuse_if_ended, taken_by_another
from torch_delta.stream.identity import Identity, create_identity, load_identity, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.format.head import Sign
    from torch_delta.format.schema import Schema
    from torch_delta.format.streaminfo import StreamInfo
    from torch_delta.store.base import Store

_MOST_REMEMBERED_COMMITS = 1024


class StoredCommit(NamedTuple):
    """A verified commit and the sha256 of its stored bytes, by which the next one names it."""

    commit: Commit
    sha256: str


class Stream:
    """One stream at the root of a store.

    Every process of a writer or reader makes its own, around the store it opened. Reading methods may be called from
    any thread; writing methods (`create`, `write_*`) only by the stream's one writer, from one thread at a time.
    Objects that are returned never change. Nothing is asked of the store before the first call.

    Args:
        store: where the stream lies; stays open, its owner closes it.

    Attributes:
        store: as given.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._identity: Identity | None = None
        self._sha256: dict[int, str] = {}  # of verified commits by version, the last ones seen
        self._lock = threading.Lock()

    def create(self, info: StreamInfo, schema: Schema) -> None:
        """Start the stream: the schema, then `stream.json`. Repeating it with the same arguments succeeds.

        Raises:
            Fenced: the root holds another stream already.
            FormatError: `schema` is not the one `info` names, or the stored schema is damaged.
            StoreUnavailable: no clear answer; repeat the call.
        """
        self._identity = create_identity(self.store, info, schema)

    def load(self) -> tuple[StreamInfo, Schema]:
        """Identity and tensor table, read once and kept.

        Raises:
            ObjectNotFound: there is no stream here (yet).
            FormatError: `stream.json` or the schema is damaged, or the schema is gone.
            UnsupportedFormat: a newer format, or a feature this release does not know.
        """
        identity = self._load()
        return identity.info, identity.schema

    @property
    def info_sha256(self) -> str:
        """Of the stored bytes of `stream.json`: the parent of version 1. Loads the stream."""
        return self._load().sha256

    def head(self, known: int | None = None) -> int:
        """The newest version. No listing is needed unless the hint is lost (rule R2).

        Args:
            known: a version the caller knows to exist. If the next one does not, that is the answer after one small
                request: the way to poll. It cannot notice that retention removed the next version meanwhile, so a
                reader that waits long asks without it now and then. None: start at the hint.

        Raises:
            ObjectNotFound: there is no stream here.
            StoreUnavailable: no clear answer.
        """
        return find_head(self.store, self._load().info.stream_id, known)

    def available(self, *, leading_to: int | None = None) -> tuple[int, int] | None:
        """First and last version whose commit can be read, or None; lists the commits.

        Args:
            leading_to: count only versions without a gap before this one, which is what `chain.plan` asks: behind a
                commit that was lost, what came before it leads nowhere.
        """
        versions = [*list_versions(self.store)]
        if leading_to is not None:
            versions = last_run(version for version in versions if version <= leading_to)
        return (versions[0], versions[-1]) if versions else None

    def commit(self, version: int, *, parent_sha256: str | None = None) -> StoredCommit:
        """A commit, after all its own claims and its place in the stream were checked (rule R4).

        Args:
            version: 1 or more.
            parent_sha256: of the commit of ``version - 1`` that the caller holds. Without it the parent is checked if
                this object has read or written it, and always for version 1.

        Raises:
            ChainError: there is no such commit, or it continues another history (fork), or it was replaced.
            FormatError: damaged, or of another stream.
            UnsupportedFormat: a newer format, or a feature this release does not know.
        """
        found = self.find_commit(version, parent_sha256=parent_sha256)
        if found is None:
            raise ChainError(
                f"{self.store.url}: there is no commit of version {version}: it was not committed yet, or retention "
                "removed it and an anchor replaces it (rule R3)",
                target=version,
                missing=version,
                key=commit_key(version),
            )
        return found

    def find_commit(self, version: int, *, parent_sha256: str | None = None) -> StoredCommit | None:
        """`commit`, or None if there is no such commit: for readers that wait for it."""
        key = commit_key(version)
        identity = self._load()
        try:
            stored = read_json(self.store, key)
        except ObjectNotFound:
            return None
        commit = Commit.from_bytes(stored, key=key)
        identity.check(key, commit.stream_id, commit.schema_id)
        if parent_sha256 is None:
            parent_sha256 = self._known_sha256(version - 1)
        if parent_sha256 is not None:
            check_parent(commit, parent_sha256)
        return StoredCommit(commit, self._remember(commit, sha256_hex(stored)))

    def adopt(self, version: int, commit_sha256: str) -> None:
        """Know the commit of a version by its hash alone, from an anchor of it, where retention removed the commit."""
        with self._lock:
            self._sha256.setdefault(version, commit_sha256)

    def commits(self, first: int, last: int) -> Iterator[StoredCommit]:
        """The commits of versions `first` to `last`, each checked against the one before; errors as in `commit`."""
        for version in range(first, last + 1):
            yield self.commit(version)

    def write_commit(self, commit: Commit) -> str:
        """Make a version exist. All its parts must be readable already (rule K7).

        Repeating the call with the same commit is how an unknown outcome is settled. Two writers must not make equal
        commits, so `commit.info` holds a nonce of the writer.

        Returns:
            sha256 of the stored bytes.

        Raises:
            Fenced: another writer committed this version (rule W5), or a successor ended the stream (N3). Stop.
            ChainError: the commit does not continue the stream's last version (rule C2).
            FormatError: the commit is of another stream or schema.
            StoreUnavailable: no clear answer; repeat the call with the same commit before anything else.
        """
        self._load().check(commit.key, commit.stream_id, commit.schema_id)
        parent = commit.version - 1
        known = self._known_sha256(parent)
        check_parent(commit, known if known is not None else self.commit(parent).sha256)
        refuse_if_ended(self.store, commit)
        stored = commit.to_bytes()
        try:
            self.store.create_or_same(commit.key, stored)
        except ObjectExists as error:
            raise taken_by_another(self.store, commit) from error
        reach("stream.commit_written")
        return self._remember(commit, sha256_hex(stored))

    def write_head(self, version: int, commit_sha256: str, sign: Sign | None = None) -> None:
        """Leave the hint where the newest version is; losing it costs readers a listing and no more (rule H1).

        Args:
            version: the newest.
            commit_sha256: of its commit; of ``stream.json`` for version 0.
            sign: of life of the writer (rule H2), or None.
        """
        stream_id = self._load().info.stream_id
        head = Head(stream_id=stream_id, version=version, commit_sha256=commit_sha256, sign=sign)
        self.store.put_hint(HEAD_KEY, head.to_bytes())
        reach("stream.head_written")

    def anchors(self) -> tuple[AnchorKey, ...]:
        """The complete anchors, oldest version first: an anchor without its manifest does not exist (rule A1)."""
        return list_anchors(self.store)

    def anchor(self, anchor: AnchorKey) -> AnchorManifest:
        """A manifest, checked as a commit is.

        Raises:
            ObjectNotFound: retention removed it.
            FormatError: damaged, of another stream, or of another history than the commits this object has seen.
        """
        key = anchor_key(anchor.version, anchor.nonce)
        identity = self._load()
        manifest = AnchorManifest.from_bytes(read_json(self.store, key), key=key)
        identity.check(key, manifest.stream_id, manifest.schema_id)
        manifest.check_schema(identity.schema)
        known = self._known_sha256(anchor.version)
        if known is not None and manifest.commit_sha256 not in {known, None}:
            raise broken(
                "A2",
                key,
                f"copies commit {manifest.commit_sha256} of version {anchor.version}, the stream has {known}",
                expected=known,
                got=manifest.commit_sha256,
            )
        return manifest

    def write_anchor(self, manifest: AnchorManifest) -> None:
        """Make an anchor exist, after all its files (rule A1). May be repeated.

        Raises:
            FormatError: it is of another stream or other tensors.
            StoreUnavailable: no clear answer; repeat the call.
        """
        identity = self._load()
        identity.check(manifest.key, manifest.stream_id, manifest.schema_id)
        manifest.check_schema(identity.schema)
        self.store.create_or_same(manifest.key, manifest.to_bytes())

    def successor(self) -> Successor | None:
        """Where the stream goes on, if a successor ended it.

        Raises:
            FormatError: damaged, or of another stream.
        """
        try:
            successor = Successor.from_bytes(read_json(self.store, SUCCESSOR_KEY, MAX_HINT_BYTES))
        except ObjectNotFound:
            return None
        self._load().check(SUCCESSOR_KEY, successor.stream_id)
        return successor

    def write_successor(self, successor: Successor) -> None:
        """End this stream in favour of another one; its old writer is fenced from now on. May be repeated.

        Raises:
            Fenced: another successor was there first.
            StoreUnavailable: no clear answer; repeat the call.
        """
        self._load().check(SUCCESSOR_KEY, successor.stream_id)
        try:
            self.store.create_or_same(SUCCESSOR_KEY, successor.to_bytes())
        except ObjectExists as error:
            raise Fenced(
                f"{self.store.url} was continued elsewhere already; follow its {SUCCESSOR_KEY}",
                version=successor.version,
                owner=None,
            ) from error

    def _load(self) -> Identity:
        if self._identity is None:
            self._identity = load_identity(self.store)
        return self._identity

    def _known_sha256(self, version: int) -> str | None:
        """Of the commit of `version` (of `stream.json` for 0), if this object has seen it."""
        return self._load().sha256 if version == 0 else self._sha256.get(version)

    def _remember(self, commit: Commit, sha256: str) -> str:
        with self._lock:
            before = self._sha256.setdefault(commit.version, sha256)
            if len(self._sha256) > _MOST_REMEMBERED_COMMITS:
                self._sha256.pop(next(iter(self._sha256)))
        if before != sha256:
            raise ChainError(
                f"{self.store.url}: {commit.key} was replaced since it was read: history was rewritten. Start again "
                "from an anchor or the base in an empty folder",
                target=commit.version,
                missing=commit.version,
                expected=before,
                got=sha256,
            )
        return sha256
