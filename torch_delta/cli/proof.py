"""Proving a stream without a copy of its weights: what `torch-delta verify` does.

    stream.json, schema ──► for every version: commit (seal, chain) ──► parts (size, sha256, every declared slice)
                                                                    ──► digests so far + increments = committed state
    anchors: sealed manifest, sha256 of every file, digests = those of their version

Increments are declared by the writer; that they are those of the payload's values is proved by whoever decodes with the
old bits at hand. Everything is looked at: one broken object does not hide the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.errors import ChainError, FormatError, ObjectNotFound
from torch_delta.format.digest import state_sha256
from torch_delta.format.frames import check_slices_disjoint
from torch_delta.format.head import Head
from torch_delta.format.keys import HEAD_KEY, PARTS_PREFIX, commit_key
from torch_delta.format.part import parse_part
from torch_delta.format.sealed import sha256_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_delta.format.anchor import AnchorFile, AnchorManifest
    from torch_delta.format.commit import Commit, PartRef
    from torch_delta.format.digest import Digest
    from torch_delta.format.part import Part
    from torch_delta.stream import Stream

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong."""

    version: int | None
    """The version it belongs to, if to one."""
    key: str
    """The object that shows it."""
    message: str


@dataclass(kw_only=True, slots=True)
class Proof:
    """What was looked at and what was found."""

    first: int
    last: int
    """First and last version with a commit; `last` is below `first` if there is none."""
    num_parts: int = 0
    checked_bytes: int = 0
    anchors: list[int] = field(default_factory=list)
    unproved: list[int] = field(default_factory=list)
    """Versions whose commits and parts are whole, but whose state could not be derived from a known one before."""
    num_unreferenced: int = 0
    unreferenced_bytes: int = 0
    """Parts that no commit names: left by versions that failed; harmless."""
    problems: list[Problem] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    """Version by its state hash, version 0 included."""
    digests: dict[int, tuple[Digest, ...]] = field(default_factory=dict)
    """Proved digests of the versions that `Prover` was asked to keep, and of the last one."""


class Prover:
    """One pass over a stream.

    Args:
        stream: to prove.
        keep: versions whose digests the proof should hold.
        advance: told the bytes of each object that was read; for a progress bar.
        full: read parts and anchors. Else they are only looked for, with the size they must have; no state is proved.
    """

    def __init__(
        self, stream: Stream, *, keep: frozenset[int], advance: Callable[[int], None], full: bool = True
    ) -> None:
        self._full = full
        self._stream = stream
        self._store = stream.store
        self._info, self._schema = stream.load()
        self._keep = keep
        self._advance = advance
        first, last = stream.available() or (1, 0)
        self._proof = Proof(first=first, last=last)
        self._used: set[str] = set()

    def run(self) -> Proof:
        """Look at everything there is.

        Raises:
            StoreUnavailable: the store could not be asked; nothing is concluded from that.
        """
        proof = self._proof
        manifests = self._anchors()
        digests: tuple[Digest, ...] | None = None
        parent: str | None = None
        base = self._info.base.digests
        proof.states[state_sha256(base)] = 0
        self._note_digests(0, base)
        if proof.first == 1:
            digests, parent = base, self._stream.info_sha256
        self._check_anchors(0, self._stream.info_sha256, base, manifests)
        for version in range(proof.first, proof.last + 1):
            if digests is None:
                digests = self._from_anchor(version - 1, manifests)
            parent, digests = self._version(version, parent, digests)
            if digests is not None:
                self._note_digests(version, digests)
            self._check_anchors(version, parent, digests, manifests)
        if digests is not None:
            proof.digests[max(proof.last, 0)] = digests
        self._hint()
        self._unreferenced()
        return proof

    def _problem(self, version: int | None, key: str, error: object) -> None:
        self._proof.problems.append(Problem(version=version, key=key, message=str(error)))

    def _note_digests(self, version: int, digests: tuple[Digest, ...]) -> None:
        if version in self._keep:
            self._proof.digests[version] = digests

    # -- versions ---------------------------------------------------------------------------------------------------

    def _version(
        self, version: int, parent: str | None, digests: tuple[Digest, ...] | None
    ) -> tuple[str | None, tuple[Digest, ...] | None]:
        """Check one version; the sha256 of its commit and its digests, each None where it cannot be told."""
        key = commit_key(version)
        try:
            commit, sha256 = self._stream.commit(version, parent_sha256=parent)
        except (ChainError, FormatError) as error:
            self._problem(version, key, error)
            return None, None
        self._proof.states[commit.state_sha256] = version
        if not self._full:
            self._look_for_parts(commit)
            self._proof.unproved.append(version)
            return sha256, None
        parts = [part for ref in commit.parts if (part := self._part(commit, ref)) is not None]
        if len(parts) < len(commit.parts):
            return sha256, None
        try:
            check_slices_disjoint([part.frames for part in parts], schema=self._schema)
        except FormatError as error:
            self._problem(version, key, error)
            return sha256, None
        if digests is None:
            self._proof.unproved.append(version)
            return sha256, None
        after = dict(zip(self._schema.data_indices, digests, strict=True))
        for part in parts:
            for item in part.slices:
                after[item.tensor] += item.increment
        result = tuple(after.values())
        if (got := state_sha256(result)) != commit.state_sha256:
            self._problem(version, key, f"{key}: its slices lead to state {got}, it says {commit.state_sha256}")
            return sha256, None
        return sha256, result

    def _look_for_parts(self, commit: Commit) -> None:
        for ref in commit.parts:
            self._used.add(ref.key)
            try:
                size_bytes = self._store.stat(ref.key).size_bytes
            except ObjectNotFound as error:
                self._problem(commit.version, ref.key, error)
                continue
            if size_bytes != ref.stored_bytes:
                message = f"{ref.key}: {size_bytes} bytes; {commit.key} says {ref.stored_bytes}"
                self._problem(commit.version, ref.key, message)
                continue
            self._proof.num_parts += 1

    def _part(self, commit: Commit, ref: PartRef) -> Part | None:
        self._used.add(ref.key)
        try:
            part = parse_part(self._part_bytes(commit, ref), schema=self._schema, key=ref.key)
            part.check_reference(ref, commit)
        except (FormatError, ObjectNotFound) as error:
            self._problem(commit.version, ref.key, error)
            return None
        self._proof.num_parts += 1
        return part

    def _part_bytes(self, commit: Commit, ref: PartRef) -> bytes:
        data = self._store.get(ref.key, max_bytes=ref.stored_bytes)
        self._count(len(data))
        found = len(data), sha256_hex(data)
        if found != (ref.stored_bytes, ref.sha256):
            raise FormatError(
                f"{ref.key}: damaged: {found[0]} bytes with sha256 {found[1]}; {commit.key} says "
                f"{ref.stored_bytes} bytes with {ref.sha256}",
                key=ref.key,
            )
        return data

    def _count(self, num_bytes: int) -> None:
        self._proof.checked_bytes += num_bytes
        self._advance(num_bytes)

    # -- anchors ----------------------------------------------------------------------------------------------------

    def _anchors(self) -> dict[int, list[AnchorManifest]]:
        found: dict[int, list[AnchorManifest]] = {}
        for anchor in self._stream.anchors():
            key = f"anchor of version {anchor.version}"
            try:
                manifest = self._stream.anchor(anchor)
                key = manifest.key
                for file in manifest.files:
                    self._anchor_file(file)
            except (FormatError, ObjectNotFound) as error:
                self._problem(anchor.version, key, error)
                continue
            found.setdefault(anchor.version, []).append(manifest)
            self._proof.anchors.append(anchor.version)
        return found

    def _anchor_file(self, file: AnchorFile) -> None:
        size_bytes = self._store.stat(file.key).size_bytes
        digest = hashlib.sha256()
        if size_bytes == file.stored_bytes and not self._full:
            return
        if size_bytes == file.stored_bytes:
            for start in range(0, size_bytes, _BLOCK_BYTES):
                block = self._store.get_range(file.key, start, min(_BLOCK_BYTES, size_bytes - start))
                digest.update(block)
                self._count(len(block))
        if size_bytes != file.stored_bytes or digest.hexdigest() != file.sha256:
            raise FormatError(f"{file.key}: damaged: not the {file.stored_bytes} bytes of its manifest", key=file.key)

    def _from_anchor(self, version: int, manifests: Mapping[int, list[AnchorManifest]]) -> tuple[Digest, ...] | None:
        return next((manifest.digests for manifest in manifests.get(version, ())), None)

    def _check_anchors(
        self,
        version: int,
        sha256: str | None,
        digests: tuple[Digest, ...] | None,
        manifests: Mapping[int, list[AnchorManifest]],
    ) -> None:
        for manifest in manifests.get(version, ()):
            if sha256 is not None and manifest.commit_sha256 not in {sha256, None}:
                self._problem(version, manifest.key, f"{manifest.key}: a copy of another history's version {version}")
            if digests is not None and manifest.digests != digests:
                self._problem(version, manifest.key, f"{manifest.key}: its digests are not those of version {version}")

    # -- around them ------------------------------------------------------------------------------------------------

    def _hint(self) -> None:
        """A hint beyond the last commit means that a commit was lost: it is written after the commit (rule H1)."""
        try:
            head = Head.from_bytes(self._store.get(HEAD_KEY))
        except (ObjectNotFound, FormatError):
            return  # allowed to be missing or damaged
        if head.stream_id == self._info.stream_id and head.version > self._proof.last >= self._proof.first:
            message = f"{HEAD_KEY} knows version {head.version}, but the last commit is {self._proof.last}"
            self._problem(head.version, HEAD_KEY, message)

    def _unreferenced(self) -> None:
        for item in self._store.list(PARTS_PREFIX):
            if item.key not in self._used:
                self._proof.num_unreferenced += 1
                self._proof.unreferenced_bytes += item.size_bytes
