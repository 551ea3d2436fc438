"""Anchors: a full copy of one version as a Hugging Face checkpoint folder, from all ranks' shards, without gathering.

    plan      every rank learns who owns which boxes; files and their owners follow from the schema alone; files that
              the newest anchor has with the same bits are copied inside the store, and nobody uploads them
    stage     a rank writes its boxes of files that other ranks own into the anchor's folder, one object per file
    assemble  the owner of a file streams it out tensor by tensor, reading the boxes of others from those objects
    seal      rank 0 compares all digests with the version's and creates the manifest, which makes the anchor exist

Memory: the largest tensor of a file and one window per rank. Before the manifest exists a reader sees nothing; what a
crash leaves behind is a folder without a manifest, or staged objects that no manifest names, and is swept later.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from torch_delta.events import AnchorReport
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.keys import new_nonce
from torch_delta.publish.anchor_job import AnchorJob, AnchorSource, AnchorState, FilePlan
from torch_delta.publish.anchor_sharing import Shared, share_files
from torch_delta.publish.anchor_writer import AnchorWriter
from torch_delta.publish.records import pack_all_owned, pack_owned, unpack_all_owned

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.format.schema import Schema

__all__ = ["AnchorJob", "AnchorState", "plan_files", "write_anchor"]


def write_anchor(
    job: AnchorJob, version: int, state: Callable[[], AnchorState | None], source: AnchorSource | None = None
) -> AnchorReport:
    """Copy what the sources hold as of their last collect. Called by every rank, in the same order.

    Args:
        job: this rank's.
        version: whose state that is.
        state: on rank 0, gives what the version is when the files are there; may wait for its commit, and what it
            raises fails the anchor on all ranks.
        source: of this rank's boxes; None is the job's.

    Raises:
        DigestMismatch: the shards are not the version's; nothing was made visible. On every rank.
        TorchDeltaError: what failed on any rank, on every rank, with `.failures`.
    """
    started = time.perf_counter()
    team, timeout_s = job.team, job.config.attach_timeout_s
    source = job.source if source is None else source
    plan = plan_files(job.source.schema, job.config.anchor_file_bytes, team.world_size)
    shared: list[Shared] = []

    def decide(owned: list[bytes]) -> bytes:
        shared.append(share_files(job, version, new_nonce(), plan, state))
        return shared[0].to_bytes() + pack_all_owned(owned)

    told = team.agree("planning an anchor", lambda: pack_owned(source.owned), decide, timeout_s=timeout_s)
    heard, taken = Shared.from_bytes(told)
    nonce, owned = heard.nonce, unpack_all_owned(told[taken:])
    writer = AnchorWriter(job, source, version=version, plan=plan, owned=owned, shared=shared[0] if shared else heard)
    try:
        team.agree("staging an anchor", writer.stage, lambda _: b"", timeout_s=timeout_s)
        staged_at = time.perf_counter()
        sealed = team.agree(
            "assembling an anchor",
            writer.assemble,
            lambda payloads: writer.seal(payloads, state()),
            timeout_s=timeout_s,
        )
    finally:
        writer.clean_up()
    done = json.loads(sealed)
    return AnchorReport(
        version=version,
        manifest_key=done["key"],
        nonce=nonce,
        num_files=done["num_files"],
        stored_bytes=done["stored_bytes"],
        staged_bytes=writer.staged_bytes,
        copied_bytes=done["copied_bytes"],
        stage_s=staged_at - started,
        assemble_s=writer.assemble_s,
        total_s=time.perf_counter() - started,
    )


def plan_files(schema: Schema, file_bytes: int, world_size: int) -> list[FilePlan]:
    """Cut the tensors into files, in schema order; the same on every rank."""
    groups: list[list[int]] = [[]]
    filled = 0
    for tensor in schema.data_indices:
        size = schema.tensors[tensor].nbytes
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return [
        FilePlan(
            name="model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            owner=(number - 1) % world_size,
            # Widest elements first, as safetensors itself does, so that every tensor is aligned.
            tensors=tuple(sorted(group, key=lambda t: (-ITEMSIZE[schema.tensors[t].dtype], t))),
        )
        for number, group in enumerate(groups, start=1)
    ]
