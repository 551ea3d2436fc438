"""Attaching to a stream: where do our weights stand, and is that where the stream stands?

All ranks bring what they own and the digests of it, in one exchange; rank 0 adds the digests up and so knows the state
of the whole model without anybody gathering it. A new stream starts at the base the state was compared with, or, where
there is none, at an anchor of the model itself. A stream that exists is continued if the state is the one at its head,
and left alone otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import BaseMismatch, CaptureError, ObjectNotFound
from torch_delta.format.digest import Digest, state_sha256
from torch_delta.format.keys import new_stream_id
from torch_delta.format.streaminfo import BaseInfo, BaseKind, StreamInfo
from torch_delta.publish.anchors import AnchorJob, AnchorState, write_anchor
from torch_delta.publish.claims import add_up, make_claim, read_claim
from torch_delta.publish.coverage import Ownership
from torch_delta.publish.progress import Lineage
from torch_delta.stream.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_delta.capture.source import OwnedBox
    from torch_delta.config import PublishConfig
    from torch_delta.format.schema import Schema
    from torch_delta.publish.base import BaseCheckpoint
    from torch_delta.publish.claims import Claim

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the ranks agreed on when attaching."""

    anchor_job: AnchorJob
    """Team, source, store, configuration and base of this rank."""
    stream_id: str
    version: int
    """Where the stream stands; 0 for a new one."""
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
    if found["starts_at_anchor"]:
        # Before stream.json, which names it: a stream never exists without its version 0.
        nonce = write_anchor(job, 0, coordinator.anchor_state()).nonce
        found = json.loads(
            job.team.agree("attach", lambda: b"", lambda _: coordinator.create_at_anchor(nonce), timeout_s=timeout_s)
        )
    data = [schema.tensors[tensor] for tensor in schema.data_indices]
    return Opening(
        anchor_job=job,
        stream_id=found["stream_id"],
        version=found["version"],
        num_elements=sum(spec.numel for spec in data),
        full_bytes=sum(spec.nbytes for spec in data),
        owned=owned,
        lineage=coordinator.lineage,
        ownership=coordinator.ownership,
    )


class _Coordinator:
    """Rank 0's part in attaching; on other ranks nothing of it is used."""

    def __init__(self, job: AnchorJob) -> None:
        self._job = job
        self._schema = job.source.schema
        self._stream = Stream(job.store)
        self._stream_id = new_stream_id()
        self._digests: list[Digest] = []
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
                return json.dumps({"starts_at_anchor": True}).encode()
            _compare_with_base(schema, self._digests, of_base, base)
            kind: BaseKind = "hf" if base.revision is not None else "local"
            self._create(BaseInfo(kind=kind, name=base.name, revision=base.revision, digests=tuple(self._digests)))
        return self._continue()

    def anchor_state(self) -> AnchorState | None:
        """The state of version 0 before its stream exists; None on other ranks."""
        if not self._job.team.is_coordinator:
            return None
        return AnchorState(stream_id=self._stream_id, version=0, commit_sha256=None, digests=self._digests)

    def create_at_anchor(self, nonce: str) -> bytes:
        """Create the stream whose version 0 is the anchor just written."""
        self._create(BaseInfo(kind="anchor", name=nonce, revision=None, digests=tuple(self._digests)))
        return self._continue()

    def _create(self, base: BaseInfo) -> None:
        info = StreamInfo(
            stream_id=self._stream_id,
            schema_id=self._schema.id,
            base=base,
            absolute_only=self._job.config.absolute_only,
            info={"writer": "torch_delta"},
        )
        self._stream.create(info, self._schema)

    def _continue(self) -> bytes:
        self.lineage = _stand_at_head(self._stream, self._schema, self._digests, self._job.config)
        return json.dumps(
            {"starts_at_anchor": False, "stream_id": self.lineage.stream_id, "version": self.lineage.version}
        ).encode()


def _stand_at_head(stream: Stream, schema: Schema, digests: list[Digest], config: PublishConfig) -> Lineage:
    """Prove that our state is the one the stream ends at."""
    info, theirs = stream.load()
    url = stream.store.url
    ways_on = (
        "publish to a new URL, or attach with the weights the stream ends at (`torch-delta pull` writes them as a "
        "checkpoint)"
    )
    if theirs.id != schema.id:
        raise BaseMismatch(
            f"{url} holds a stream of other tensors (schema {theirs.id[:12]}, ours {schema.id[:12]}); {ways_on}",
            url=url,
            expected=theirs.id,
            got=schema.id,
        )
    if info.absolute_only and not config.absolute_only:
        raise BaseMismatch(
            f"{url} was declared absolute-only and its receivers rely on it; set absolute_only=True", url=url
        )
    version = stream.head()
    parent_sha256, expected = stream.info_sha256, state_sha256(info.base.digests)
    if version > 0:
        commit, parent_sha256 = stream.commit(version)
        expected = commit.state_sha256
    got = state_sha256(digests)
    if got != expected:
        changed = _differing(schema, digests, info.base.digests) if version == 0 else []
        named = f" in {len(changed)} tensors ({', '.join(changed[:_SHOWN])})" if changed else ""
        raise BaseMismatch(
            f"{url} stands at version {version} with other weights than the model's{named}: expected state "
            f"{expected[:12]}, got {got[:12]}; {ways_on}",
            url=url,
            version=version,
            expected=expected,
            got=got,
            tensors=changed[:100],
        )
    return Lineage(
        stream=stream,
        stream_id=info.stream_id,
        schema=schema,
        version=version,
        parent_sha256=parent_sha256,
        digests=digests,
    )


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
    changed = _differing(schema, digests, expected)
    if changed:
        raise BaseMismatch(
            f"{len(changed)} of {len(expected)} tensors of the model differ from the base {base.name}: "
            f"{', '.join(changed[:_SHOWN])}; load the model from this base, or attach with base=None, which starts the "
            "stream at a copy of the model as it is",
            tensors=changed[:100],
            base=base.name,
        )


def _differing(schema: Schema, digests: Sequence[Digest], expected: Sequence[Digest]) -> list[str]:
    return [
        schema.tensors[tensor].name
        for tensor, mine, theirs in zip(schema.data_indices, digests, expected, strict=True)
        if mine != theirs
    ]
