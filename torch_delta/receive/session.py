"""What the one writer of a checkpoint does while it holds the writer lock.

How version v becomes v+1, and what a crash at each line leaves (the next opener finishes or forgets it):

    patch of v+1 written to tmp/, synced, renamed into patches/     forgotten: the state says v, the weights are v's
    (readers out)
    state of v+1 written, synced, renamed to next.json              from here on v+1: the patch is written again
    values of the patch written into the weight files               torn until written again; absolute, so again is safe
    next.json renamed to state.json                                 done
    (readers in)

The weight files themselves are not synced per version: patches since the last sync are kept, and after a power cut
(another boot id) they are written again in order and everything is verified in full.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch_delta.crashpoints import reach
from torch_delta.errors import ChainError
from torch_delta.receive.access import StateReader, exclusive
from torch_delta.receive.diskio import check_room, local_io, put_in_place, replace_synced, write_synced
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.patches import Patch, open_patch
from torch_delta.receive.proofs import check_base, check_damage, check_fit, check_rest, wrong_tensors
from torch_delta.receive.retention import kept_patches, prune, redo_log_is_long
from torch_delta.receive.state import Layout, State, boot_id, read_schema, unbound_state
from torch_delta.receive.weights import Weights
from torch_delta.receive.workers import run_all

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.receive.install import Stage
    from torch_delta.receive.prepared import Prepared

logger = logging.getLogger("torch_delta")

_PAGE_BYTES = 4096
_FEWEST_FOR_THREADS = 1 << 16
_SHARES_PER_THREAD = 2
_LEAST_BUDGET_BYTES = 16 << 20


class Session:
    """The writer's view of a checkpoint; made by `LocalCheckpoint.writing`, valid inside that block, for one thread.

    Args:
        layout: of the checkpoint; the caller holds its writer lock.
        states: the checkpoint's state reader.
        weights: mapping kept from an earlier session of this process, or None.
        allow_extra: names of tensors that the folder may hold although the stream does not know them.
        patch_budget_bytes: most that patches kept for consumers alone may take, or None for the size of the weights (at
            least 16 MiB).
        timeout_s: for readers to leave.
        fsync: sync the journal before weights change.

    Attributes:
        layout: as given.
        timeout_s: as given.
        pool: threads for work on tensors and frames.
    """

    def __init__(
        self,
        layout: Layout,
        states: StateReader,
        *,
        weights: Weights | None,
        allow_extra: Collection[str],
        patch_budget_bytes: int | None,
        timeout_s: float,
        fsync: bool = True,
    ) -> None:
        self.layout = layout
        self.timeout_s = timeout_s
        self._num_threads = min(4, os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="torch-delta-receive")
        self._fsync = fsync
        self._states = states
        self._weights = weights
        self._allow_extra = allow_extra
        self._patch_budget_bytes = patch_budget_bytes
        self._schema: Schema | None = weights.schema if weights is not None else None

    @property
    def state(self) -> State | None:
        """The current state, None for an empty checkpoint."""
        return self._states.read()

    def bound_state(self) -> State:
        """The current state of a checkpoint that follows a stream and is not damaged.

        Raises:
            ChainError: it is empty or follows no stream yet.
            DigestMismatch: its weights are damaged.
        """
        state = self.state
        if state is None or not state.stream_id:
            raise ChainError(f"{self.layout.root} follows no stream yet", path=str(self.layout.root))
        check_damage(self.layout.root, state)
        return state

    @property
    def schema(self) -> Schema:
        """Of the stream the checkpoint follows.

        Raises:
            FormatError: the stored copy is damaged.
        """
        state = self.state
        assert state is not None, "an empty checkpoint has no schema"
        if self._schema is None or self._schema.id != state.schema_id:
            self._schema = read_schema(self.layout, state)
        return self._schema

    @property
    def weights(self) -> Weights:
        """The live weight files, mapped for writing.

        Raises:
            BaseMismatch: somebody replaced them by files with other tensors.
        """
        schema = self.schema
        if self._weights is None or self._weights.schema.id != schema.id or not self._weights.is_current():
            self._map(schema)
            assert self._weights is not None
        return self._weights

    def _map(self, schema: Schema) -> None:
        self.drop_weights()
        folder = SafetensorsFolder.open(self.layout.root)
        check_fit(folder, schema, self._allow_extra)
        self._weights = Weights(folder, schema, writable=True)

    def drop_weights(self) -> None:
        """Forget the mapping."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def close(self) -> Weights | None:
        """End the session; hands back the mapping for the next one."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        return self._weights

    # -- the first files --------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take the weight files that lie at the path as they are."""
        with local_io(self.layout.hidden, "take over the weights"):
            self._put_state(unbound_state(shared_extents=False))

    def install(self, stage: Stage, state: State, schema_bytes: bytes | None) -> None:
        """Replace the weight files by those of a stage (a base or an anchor), whatever was there before."""
        self.drop_weights()
        with exclusive(self.layout, self.timeout_s):
            stage.install(state, schema_bytes)

    def bind(self, *, stream_id: str, commit_sha256: str, schema: Schema, digests: Sequence[Digest]) -> None:
        """Make the folder version 0 of a stream, once its bits are proved to be the stream's base.

        Raises:
            BaseMismatch: other tensors, shapes, dtypes or bits; names the tensors.
        """
        self._map(schema)
        assert self._weights is not None
        wrong = wrong_tensors(self._weights, schema, digests, self.pool)
        check_base(self.layout.root, stream_id, wrong, len(digests))
        old = self.state
        state = State(
            stream_id=stream_id,
            version=0,
            commit_sha256=commit_sha256,
            schema_id=schema.id,
            digests=tuple(digests),
            synced_version=0,
            boot_id=boot_id(),
            shared_extents=old is not None and old.shared_extents,
        )
        with local_io(self.layout.hidden, "bind the checkpoint to its stream"):
            temporary = self.layout.schema.with_suffix(".new")
            write_synced(temporary, [schema.to_bytes()])
            replace_synced(temporary, self.layout.schema)
            self._weights.sync()
            reach("receive.schema_kept")
            self._put_state(state)

    def rebind(self, *, stream_id: str, commit_sha256: str) -> None:
        """Make the same bits version 0 of the stream that continues this one; its digests are the caller's business.

        Patches lead between versions of the old stream and go first; the weights are on disk by then, so that a crash
        leaves either stream.
        """
        state = self.bound_state()
        self.sync()
        for patch in kept_patches(self.layout):
            self.layout.patch(patch.version, patch.since).unlink(missing_ok=True)
        reach("receive.patches_dropped")
        with local_io(self.layout.hidden, "change over to another stream"):
            self._put_state(
                dataclasses.replace(
                    state,
                    stream_id=stream_id,
                    version=0,
                    commit_sha256=commit_sha256,
                    synced_version=0,
                    patch_hash="",
                    patch_since=-1,
                    boot_id=boot_id(),
                )
            )

    # -- versions ---------------------------------------------------------------------------------------------------

    def apply(self, prepared: Prepared) -> None:
        """Write what was prepared (rule R7); when this returns, the checkpoint is at it whatever crashes afterwards.

        Raises:
            ChainError: it was prepared for another state.
            StoreUnavailable: no room or no permission; the checkpoint is still at its old version.
            DeadlineExceeded: readers did not leave; the same.
        """
        layout, state = self.layout, self.bound_state()
        if (prepared.since, prepared.parent_sha256) != (state.version, state.commit_sha256):
            raise ChainError(
                f"{layout.root} is at version {state.version}, the patch leads from {prepared.since} to "
                f"{prepared.version}, or belongs to another history",
                local_version=state.version,
                target=prepared.version,
            )
        path, staged = layout.patch(prepared.version, prepared.since), layout.next.with_suffix(".new")
        target = dataclasses.replace(
            state,
            version=prepared.version,
            commit_sha256=prepared.commit_sha256,
            digests=prepared.digests,
            patch_hash=prepared.patch_hash,
            patch_since=prepared.since,
            boot_id=boot_id(),
        )
        with local_io(layout.root, f"journal version {prepared.version}"):
            put_in_place(prepared.patch, path, fsync=self._fsync)
            reach("receive.patch_kept")
            patch = open_patch(path, self.schema)
            weights = self.weights
            self._check_room(state, patch)
            staged.write_bytes(target.to_bytes())
        with exclusive(layout, self.timeout_s):
            with local_io(layout.root, f"journal version {prepared.version}"):
                put_in_place(staged, layout.next, fsync=self._fsync)
            reach("receive.next_written")
            self.write(patch, weights)
            reach("receive.weights_written")
            layout.next.replace(layout.state)
            reach("receive.state_switched")
        self._tidy()

    def write(self, patch: Patch, weights: Weights | None = None) -> None:
        """Set the values of a patch in the weight files; the caller keeps readers out."""
        into = self.weights if weights is None else weights

        def write_tensors(tensors: Sequence[int]) -> None:
            into.overwrite_all([(tensor, *found) for tensor in tensors for found in patch[tensor]])
            for _ in tensors:
                reach("receive.tensor_written")

        # Every page that is written faults once, in the kernel and without the GIL: threads share that.
        if patch.num_changed < _FEWEST_FOR_THREADS:
            for tensor in patch:
                write_tensors([tensor])
        else:
            run_all(self.pool, write_tensors, _shares(patch, _SHARES_PER_THREAD * self._num_threads))

    def _check_room(self, state: State, patch: Patch) -> None:
        """Writing to a cloned file takes blocks, and a mapped write that finds none kills the process."""
        if state.shared_extents:
            check_room(self.layout.root, min(patch.num_changed * _PAGE_BYTES, self.weights.size_bytes))

    def _tidy(self) -> None:
        """Sync the weights when the redo log got long, and drop patches nobody needs."""
        kept = kept_patches(self.layout)
        if redo_log_is_long(kept, self.bound_state().synced_version):
            self.sync()
        state, budget = self.bound_state(), self._patch_budget_bytes
        prune(
            self.layout,
            kept,
            version=state.version,
            synced_version=state.synced_version,
            budget_bytes=max(self.weights.size_bytes, _LEAST_BUDGET_BYTES) if budget is None else budget,
        )

    def sync(self) -> None:
        """Bring the weight files to disk, so that the patches up to now are no longer needed as redo log."""
        state = self.bound_state()
        self.weights.sync()
        reach("receive.weights_synced")
        with local_io(self.layout.hidden, "note that the weights are on disk"):
            self._put_state(dataclasses.replace(state, synced_version=state.version, boot_id=boot_id()))

    # -- truth ------------------------------------------------------------------------------------------------------

    def verify_full(self) -> None:
        """Digest every byte at rest and compare with the state.

        Raises:
            DigestMismatch: names the tensors that differ.
        """
        state = self.bound_state()
        check_rest(self.layout.root, state, wrong_tensors(self.weights, self.schema, state.digests, self.pool))

    def mark_damaged(self, reason: str) -> None:
        """Say in the state that the weight files cannot be trusted; readers are refused until they are replaced."""
        state = self.state
        assert state is not None
        logger.error("%s is damaged: %s", self.layout.root, reason)
        with local_io(self.layout.hidden, "note that the weights are damaged"):
            self._put_state(dataclasses.replace(state, damage=reason))
            self.layout.next.unlink(missing_ok=True)

    def _put_state(self, state: State) -> None:
        temporary = self.layout.state.with_suffix(".new")
        write_synced(temporary, [state.to_bytes()])
        replace_synced(temporary, self.layout.state)


def _shares(patch: Patch, num_shares: int) -> list[list[int]]:
    """The tensors of a patch in about so many groups that set about as many elements each."""
    counts = {tensor: sum(found.value.size for found in patch[tensor]) for tensor in patch}
    most = sum(counts.values()) // num_shares
    shares: list[list[int]] = []
    filled = most
    for tensor, count in counts.items():
        if filled >= most:
            shares.append([])
            filled = 0
        shares[-1].append(tensor)
        filled += count
    return shares
