"""Starting from an anchor: its files are fetched beside the old ones, proved, and only then moved into place."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from torch_delta.errors import BaseMismatch, DigestMismatch, FormatError, ObjectNotFound, UnsupportedFormat
from torch_delta.format.digest import state_sha256
from torch_delta.receive.fetch import Wanted, fetch_to_file
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.install import Stage
from torch_delta.receive.proofs import check_fit, wrong_tensors
from torch_delta.receive.reports import ApplyReport
from torch_delta.receive.state import State, boot_id
from torch_delta.receive.weights import Weights
from torch_delta.receive.workers import run_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import ThreadPoolExecutor

    from torch_delta.format.anchor import AnchorManifest
    from torch_delta.format.keys import AnchorKey
    from torch_delta.receive.session import Session
    from torch_delta.stream import Stream

logger = logging.getLogger("torch_delta")


def load_newest(
    session: Session, stream: Stream, anchors: Sequence[AnchorKey], pool: ThreadPoolExecutor
) -> ApplyReport:
    """Load the first of `anchors` that is whole; the last error if none is.

    Raises:
        ObjectNotFound, FormatError, DigestMismatch, BaseMismatch: what was wrong with the last one.
        StoreUnavailable: no clear answer, or no room here.
    """
    for number, anchor in enumerate(anchors, start=1):
        try:
            return load_anchor(session, stream, anchor, pool)
        except UnsupportedFormat:
            raise
        except (ObjectNotFound, FormatError, DigestMismatch, BaseMismatch) as error:
            if number == len(anchors):
                raise
            logger.warning("%s: anchor of version %d not used: %s", stream.store.url, anchor.version, error)
    raise AssertionError("called without anchors")


def load_anchor(session: Session, stream: Stream, anchor: AnchorKey, pool: ThreadPoolExecutor) -> ApplyReport:
    """Replace the checkpoint's weights by an anchor; until everything is proved they stay as they are."""
    info, schema = stream.load()
    old = session.state
    started_s = time.perf_counter()
    manifest = stream.anchor(anchor)
    commit_sha256 = _check_place(stream, manifest)
    stage = Stage(session.layout)
    try:
        wanted = [(Wanted(file.key, file.stored_bytes, file.sha256), stage.path / file.name) for file in manifest.files]
        run_all(pool, lambda item: fetch_to_file(stream.store, *item), wanted)
        fetched_s = time.perf_counter()
        folder = SafetensorsFolder.open(stage.path)
        check_fit(folder, schema, ())
        _check_files(manifest, folder)
        with Weights(folder, schema, writable=False) as weights:
            wrong = wrong_tensors(weights, schema, manifest.digests, session.pool)
            full_bytes = weights.size_bytes
        _check_bits(manifest, wrong)
        verified_s = time.perf_counter()
        state = State(
            stream_id=info.stream_id,
            version=manifest.version,
            commit_sha256=commit_sha256,
            schema_id=schema.id,
            digests=manifest.digests,
            synced_version=manifest.version,
            boot_id=boot_id(),
        )
        session.install(stage, state, schema.to_bytes())
    except BaseException:
        # Once the move is recorded it must be finished, by whoever opens the checkpoint next.
        if not session.layout.install.exists():
            stage.discard()
        raise
    return ApplyReport(
        version=manifest.version,
        from_version=old.version if old is not None and old.stream_id and not old.damage else None,
        kind="anchor",
        num_changed=sum(schema.tensors[index].numel for index in schema.data_indices),
        stored_bytes=sum(file.stored_bytes for file in manifest.files),
        full_bytes=full_bytes,
        fetch_s=fetched_s - started_s,
        decode_s=0.0,
        verify_s=verified_s - fetched_s,
        apply_s=time.perf_counter() - verified_s,
        wait_s=0.0,
        stream_id=info.stream_id,
    )


def _check_files(manifest: AnchorManifest, folder: SafetensorsFolder) -> None:
    for name, file in manifest.tensor_files.items():
        if folder.tensors[name].file != file:
            raise FormatError(
                f"{manifest.key}: tensor {name!r} lies in {folder.tensors[name].file}, it says {file} (rule A4)",
                rule="A4",
                key=manifest.key,
            )


def _check_bits(manifest: AnchorManifest, wrong: Sequence[str]) -> None:
    if wrong:
        raise DigestMismatch(
            f"{manifest.key}: {len(wrong)} tensors are not what the manifest says, such as {', '.join(wrong[:10])}",
            key=manifest.key,
            tensor=wrong[0],
            tensors=tuple(wrong),
            version=manifest.version,
        )


def _check_place(stream: Stream, manifest: AnchorManifest) -> str:
    """The commit that the anchor copies, after what can be checked about it was: the next delta must follow it."""
    info, _ = stream.load()
    if manifest.version == 0:
        if manifest.digests != info.base.digests:
            raise FormatError(
                f"{manifest.key}: its digests are not those of the stream's base (rule A2)", rule="A2", key=manifest.key
            )
        return stream.info_sha256
    assert manifest.commit_sha256 is not None
    found = stream.find_commit(manifest.version)
    # Retention may have removed the commit: then its hash still chains the next one to this anchor.
    if found is not None and (found.sha256, found.commit.state_sha256) != (
        manifest.commit_sha256,
        state_sha256(manifest.digests),
    ):
        raise FormatError(
            f"{manifest.key}: not the state that {found.commit.key} committed (rule A2)",
            rule="A2",
            key=manifest.key,
            expected=found.sha256,
            got=manifest.commit_sha256,
        )
    return manifest.commit_sha256
