"""Attaching to a stream: where do our weights stand, and is that where the stream stands?

All ranks bring what they own and the digests of it, in one exchange; rank 0 adds the digests up and so knows the state
of the whole model without anybody gathering it. A new stream starts at the base the state was compared with, or, where
there is none, at an anchor of the model itself. A stream that exists is continued if the state is the one at its head;
otherwise a new lineage is forked from it (see `restart`), or it is left alone.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_delta import crashpoints
from torch_delta.errors import BaseMismatch, CaptureError, ObjectNotFound, StoreError
from torch_delta.format.digest import Digest
from torch_delta.format.keys import new_stream_id
from torch_delta.format.streaminfo import BaseInfo, BaseKind, StreamInfo
from torch_delta.publish.anchors import AnchorJob, AnchorState, write_anchor
from torch_delta.publish.claims import add_up, make_claim, read_claim
from torch_delta.publish.coverage import Ownership
from torch_delta.publish.pulse import refuse_if_alive
from torch_delta.publish.restart import differing, refuse, stand
from torch_delta.stream.forks import note_fork, refuse_if_swept
from torch_delta.stream.lineages import fork_root
from torch_delta.stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.capture.source import OwnedBox
    from torch_delta.format.fork import ForkNote
    from torch_delta.format.schema import Schema
    from torch_delta.publish.base import BaseCheckpoint
    from torch_delta.publish.claims import Claim
    from torch_delta.publish.progress import Lineage
    from torch_delta.publish.restart import Standing
    from torch_delta.store.base import Store

_logger = logging.getLogger("torch_delta")
_SHOWN = 8
_NEAR = ("file:", "memory:")  # who reaches a stream there can be given the base in the same way


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the ranks agreed on when attaching."""

    anchor_job: AnchorJob
    """Team, source, configuration and base of this rank, and the store of the lineage that is published to."""
    has_moved: bool
    """Whether that store was opened here, because the lineage lies beside the URL that was attached to."""
    stream_id: str
    version: int
    """Where the stream stands; 0 for a new one."""
    wants_anchor: bool
    """Whether that version gets an anchor now, because receivers have nothing else to start from."""
    num_elements: int
    full_bytes: int
    owned: Sequence[OwnedBox]
    lineage: Lineage | None
    """On rank 0."""
    ownership: Ownership | None
    """On rank 0."""


def open_lineage(job: AnchorJob) -> Opening:
    """Agree with the other ranks and create or continue the stream. Called by every rank, between training steps.

    Args:
        job: this rank's. Without a base, a new stream starts at an anchor of the model, which is written here.

    Raises:
        BaseMismatch: the weights are not the base's, or not those at the head of the stream; names tensors if known.
        CaptureError: the ranks do not own every element exactly once.
        Fenced: another writer started a stream here at the same moment.
        TorchDeltaError: anything that failed on any rank, on all of them, with `.failures`.
    """
    source, schema, timeout_s = job.source, job.source.schema, job.config.attach_timeout_s
    owned = source.owned
    coordinator = _Coordinator(job)
    found = json.loads(
        job.team.agree("attach", lambda: make_claim(job, owned), coordinator.examine, timeout_s=timeout_s)
    )
    job = _moved(job, found["roots"])
    try:
        if found["starts_at_anchor"]:
            # Before stream.json, which names it: a stream never exists without its version 0.
            nonce = write_anchor(job, 0, coordinator.anchor_state).nonce
            found = json.loads(
                job.team.agree(
                    "attach", lambda: b"", lambda _: coordinator.create_at_anchor(nonce, job.store), timeout_s=timeout_s
                )
            )
    except BaseException:
        if found["roots"]:
            job.store.close()
        raise
    if coordinator.lineage is not None and found["roots"]:
        coordinator.lineage.stream.store.close()  # the coordinator's own look at it
        coordinator.lineage.stream = Stream(job.store)
        coordinator.lineage.stream.adopt(coordinator.lineage.version, coordinator.lineage.parent_sha256)
    data = [schema.tensors[tensor] for tensor in schema.data_indices]
    return Opening(
        anchor_job=job,
        has_moved=bool(found["roots"]),
        stream_id=found["stream_id"],
        version=found["version"],
        wants_anchor=found["wants_anchor"],
        num_elements=sum(spec.numel for spec in data),
        full_bytes=sum(spec.nbytes for spec in data),
        owned=owned,
        lineage=coordinator.lineage,
        ownership=coordinator.ownership,
    )


def _moved(job: AnchorJob, roots: Sequence[str]) -> AnchorJob:
    """The job, in the store that lies at `roots`, one after the other, from its own."""
    store = job.store
    for number, root in enumerate(roots):
        inner = store.sibling(root)
        if number:
            store.close()
        store = inner
    return replace(job, store=store)


class _Coordinator:
    """Rank 0's part in attaching; on other ranks nothing of it is used."""

    def __init__(self, job: AnchorJob) -> None:
        self._job = job
        self._schema = job.source.schema
        self._stream = Stream(job.store)
        self._stream_id = new_stream_id()
        self._digests: list[Digest] = []
        self._standing: Standing | None = None
        self._fork_root = ""
        self._note: ForkNote | None = None  # of the fork that this writer makes
        self._is_new = False  # created by this very writer
        self.ownership: Ownership | None = None
        self.lineage: Lineage | None = None

    def examine(self, payloads: list[bytes]) -> bytes:
        """Prove coverage, add up the digests, continue or create the stream; or say that it must start at an anchor."""
        claims = [read_claim(payload) for payload in payloads]
        schema, base = self._schema, self._job.base
        other = next((rank for rank, claim in enumerate(claims) if claim.schema_id != schema.id), None)
        if other is not None:
            raise CaptureError(f"ranks 0 and {other} publish different tensors; every rank needs the same model")
        _refuse_other_settings(claims)
        constant = claims[0].constant
        self.ownership = Ownership(schema, {r: claim.owned for r, claim in enumerate(claims)}, constant=constant)
        model, of_base = add_up(claim.model for claim in claims), add_up(claim.base for claim in claims)
        self._digests = [
            of_base[tensor] if tensor in constant else model.get(tensor, Digest.ZERO) for tensor in schema.data_indices
        ]
        try:
            self._stream.load()
        except ObjectNotFound:
            if base is None:
                return json.dumps({"starts_at_anchor": True, "roots": []}).encode()
            _compare_with_base(schema, self._digests, of_base, base)
            kind: BaseKind = "hf" if base.revision is not None else "local"
            self._create(BaseInfo(kind=kind, name=base.name, revision=base.revision, digests=tuple(self._digests)))
        return self._continue()

    def anchor_state(self) -> AnchorState | None:
        """The state of version 0 before its stream exists; None on other ranks."""
        if not self._job.team.is_coordinator:
            return None
        return AnchorState(stream_id=self._stream_id, version=0, commit_sha256=None, digests=self._digests)

    def create_at_anchor(self, nonce: str, store: Store) -> bytes:
        """Create the stream whose version 0 is the anchor just written, and end the one it was forked from, if any."""
        before, digests = self._standing, tuple(self._digests)
        base = BaseInfo(kind="anchor", name=nonce, revision=None, digests=digests)
        if before is not None and before.at is not None:
            old_id = before.stream.load()[0].stream_id
            base = BaseInfo(kind="stream", name=old_id, revision=str(before.at.version), digests=digests)
        if before is not None:
            self._stream = Stream(before.stream.store.sibling(self._fork_root))
        self._create(base)
        crashpoints.reach("publish.lineage_created")
        if before is not None:
            refuse_if_swept(self._stream.store, nonce)
            # The line that moves readers over and fences the old writer. Whoever comes second starts again from there.
            before.stream.write_successor(before.successor(self._fork_root, self._stream_id))
            crashpoints.reach("publish.successor_written")
            self._forget_note(before.stream)
            _logger.warning("%s was ended; it goes on at %s", before.stream.store.url, store.url)
            if before.roots:
                before.stream.store.close()
        return self._continue()

    def _create(self, base: BaseInfo) -> None:
        info = StreamInfo(
            stream_id=self._stream_id,
            schema_id=self._schema.id,
            base=base,
            required_features=self._job.config.required_features,
            absolute_only=self._job.config.absolute_only,
            info={"writer": "torch_delta"},
        )
        self._stream.create(info, self._schema)
        self._is_new = True

    def _continue(self) -> bytes:
        config = self._job.config
        standing = stand(self._stream, self._schema, self._digests, config)
        if not standing.is_head and config.on_restart == "refuse":
            raise refuse(standing, self._schema, self._digests)
        if not self._is_new and config.on_restart != "takeover":
            refuse_if_alive(standing.stream)
        if not standing.is_head:
            self._standing = standing
            self._fork_root = fork_root(standing.stream.store.url)
            self._note = note_fork(standing.stream, self._fork_root, self._stream_id)
            crashpoints.reach("publish.fork_noted")
            return json.dumps({"starts_at_anchor": True, "roots": [*standing.roots, self._fork_root]}).encode()
        self.lineage = standing.lineage(self._schema, self._digests)
        return json.dumps(
            {
                "starts_at_anchor": False,
                "roots": standing.roots if self._standing is None else [self._fork_root],
                "stream_id": self.lineage.stream_id,
                "version": self.lineage.version,
                "wants_anchor": self._wants_anchor(self.lineage.stream),
            }
        ).encode()

    def _forget_note(self, stream: Stream) -> None:
        if self._note is not None:
            try:
                stream.store.delete(self._note.key)
            except StoreError as error:  # retention sees that it is done with, and removes it
                _logger.warning("the note of the fork of %s was not removed: %s", stream.store.url, error)

    def _wants_anchor(self, stream: Stream) -> bool:
        wanted = self._job.config.anchor_first
        if wanted is None:
            is_near = stream.store.url.startswith(_NEAR)
            wanted = stream.load()[0].base.kind == "local" and not is_near
        return wanted and not stream.anchors()


def _refuse_other_settings(claims: Sequence[Claim]) -> None:
    """Ranks that publish at other steps wait for each other; one with relative encodings breaks an absolute stream."""
    for rank, claim in enumerate(claims):
        for name, value in claims[0].config.items():
            if claim.config[name] != value:
                raise CaptureError(
                    f"ranks 0 and {rank} were configured differently: {name} is {value} and {claim.config[name]}; give "
                    "every rank the same configuration",
                    ranks=(0, rank),
                )


def _compare_with_base(
    schema: Schema, digests: Sequence[Digest], of_base: Mapping[int, Digest], base: BaseCheckpoint
) -> None:
    expected = [of_base[tensor] for tensor in schema.data_indices]
    changed = differing(schema, digests, expected)
    if changed:
        raise BaseMismatch(
            f"{len(changed)} of {len(expected)} tensors of the model differ from the base {base.name}: "
            f"{', '.join(changed[:_SHOWN])}; load the model from this base, or attach with base=None, which starts the "
            "stream at a copy of the model as it is",
            tensors=changed[:100],
            base=base.name,
        )
