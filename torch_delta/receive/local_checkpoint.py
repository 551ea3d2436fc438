"""A checkpoint folder on this host that follows a stream: ordinary files, changed in place, never seen half changed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch_delta.errors import ChainError, CheckpointBusy, StoreUnavailable
from torch_delta.receive.access import StateReader, needs_recovery, share
from torch_delta.receive.base import fill
from torch_delta.receive.consumers import Consumer
from torch_delta.receive.diskio import local_io
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.install import has_leftovers
from torch_delta.receive.locks import FileLock
from torch_delta.receive.patches import Patch, open_patch
from torch_delta.receive.proofs import check_damage, check_fit, check_rest, wrong_tensors
from torch_delta.receive.recovery import recover
from torch_delta.receive.reports import VerifyReport
from torch_delta.receive.retention import kept_patches, way
from torch_delta.receive.session import Session
from torch_delta.receive.state import Layout, State, read_schema
from torch_delta.receive.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import TracebackType

    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema
    from torch_delta.receive.prepared import Prepared


class LocalCheckpoint:
    """A working copy of a checkpoint, kept at a version of a stream by a `Follower`.

        checkpoint = LocalCheckpoint("/nvme/qwen3-8b", base="Qwen/Qwen3-8B")
        for report in Follower("s3://bucket/run-7").apply_to(checkpoint):
            with checkpoint.reading() as folder:
                model = AutoModelForCausalLM.from_pretrained(folder).to("cuda")  # on CPU: copy.deepcopy(...)

    Any number of processes of one host may open the same path. One of them at a time writes; the others wait and then
    find the work done. Threads: every method may be called from any thread.

    Args:
        path: the folder, on a local disk. Created if needed. Files in it are changed in place, which is why it is never
            the base itself.
        base: checkpoint folder or Hub id (``name`` or ``name@revision``) to copy from the first time; ignored
            afterwards. None takes the weights that lie at `path`, or starts from an anchor of the stream.
        allow_extra: tensors the folder may hold although the stream does not know them; they stay as they are.
        patch_budget_bytes: most that patches kept for slow consumers may take; None for the size of the weights.
        timeout_s: how long to wait for other processes at this path, unless a call says otherwise.
        fsync: wait for the disk before weights change. Without it a killed process is repaired all the same, but after
            a power cut the folder may have to start again.

    Raises:
        FormatError: the base or the folder is no safetensors checkpoint, or its state is damaged.
        StoreUnavailable: no permission or no room; nothing was changed.
        DeadlineExceeded: another process held the checkpoint for `timeout_s` seconds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        allow_extra: Collection[str] = (),
        patch_budget_bytes: int | None = None,
        timeout_s: float = 600.0,
        fsync: bool = True,
    ) -> None:
        self.path = Path(path).absolute()
        self.base = base
        self.timeout_s = timeout_s
        self._allow_extra = frozenset(allow_extra)
        self._patch_budget_bytes = patch_budget_bytes
        self._fsync = fsync
        self._layout = Layout(self.path)
        self._states = StateReader(self._layout.state)
        self._weights: Weights | None = None
        self._weights_lock = threading.Lock()
        self._verified = False
        self._open()

    def _open(self) -> None:
        if self._states.read() is None:
            with local_io(self.path, "create the checkpoint folder"):
                for folder in (self._layout.tmp, self._layout.patches, self._layout.consumers):
                    folder.mkdir(parents=True, exist_ok=True)
            with self.writing(purpose="copy the base"):
                pass
        elif needs_recovery(self._layout, self._states.read()):
            with self.writing(purpose="recover"):
                pass
        elif has_leftovers(self._layout):
            # Perhaps gigabytes that a dead process left (F84); perhaps a live one's work: then they stay.
            with contextlib.suppress(CheckpointBusy, StoreUnavailable), self.writing(timeout_s=0, purpose="clean up"):
                pass

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version that the weight files hold, verified; None before the checkpoint follows a stream."""
        state = self._states.read()
        return state.version if state is not None and state.stream_id else None

    @property
    def stream_id(self) -> str | None:
        """The stream it follows, if any."""
        state = self._states.read()
        return state.stream_id or None if state is not None else None

    @property
    def is_unbound(self) -> bool:
        """Whether there are weight files that follow no stream yet: a copy of a base, waiting for its first version."""
        state = self._states.read()
        return state is not None and not state.stream_id

    @property
    def commit_sha256(self) -> str | None:
        """Of the commit of `version`, if it follows a stream."""
        state = self._states.read()
        return state.commit_sha256 or None if state is not None else None

    @property
    def damage(self) -> str:
        """Why the weight files cannot be trusted, until a follower replaces them; empty when they can."""
        state = self._states.read()
        return state.damage if state is not None else ""

    @property
    def schema(self) -> Schema:
        """Tensors of the stream it follows.

        Raises:
            ChainError: it follows none yet.
        """
        state = self._bound_state()
        return read_schema(self._layout, state)

    @property
    def digests(self) -> tuple[Digest, ...]:
        """Of every tensor that is not an alias, in schema order, at `version`; same errors as `schema`."""
        return self._bound_state().digests

    def _bound_state(self) -> State:
        state = self._states.read()
        if state is None or not state.stream_id:
            raise ChainError(f"{self.path} follows no stream yet; apply one with a Follower first", path=str(self.path))
        return state

    # -- readers ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, *, timeout_s: float | None = None) -> Iterator[Path]:
        """Hold the weight files still and yield their folder; they are whole and at `version` inside the block.

        Writers wait for the block to end, though they go on downloading meanwhile. Not to be nested.

        What is kept beyond the block must be a copy (F25): safetensors maps the files, so that tensors loaded on CPU in
        their own dtype are views of them, which the next version changes.

        Raises:
            DigestMismatch: the weights are damaged (and say so) until a follower heals them.
            ChainError: there is nothing here yet.
            CheckpointBusy, DeadlineExceeded: a writer did not finish in time; names it.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            lock = share(self._layout, max(0.0, deadline - time.monotonic()))
            try:
                state = self._states.read()
                if not needs_recovery(self._layout, state):
                    if state is None:
                        raise ChainError(
                            f"{self.path} is empty; apply a stream with a Follower first", path=str(self.path)
                        )
                    check_damage(self.path, state)
                    yield self.path
                    return
            finally:
                lock.release()
            with self.writing(timeout_s=max(0.0, deadline - time.monotonic()), purpose="recover"):
                pass

    def verify(
        self, *, full: bool = True, timeout_s: float | None = None, on_bytes: Callable[[int], object] = lambda _: None
    ) -> VerifyReport:
        """Prove that the files are what the state says.

        Args:
            full: digest every byte at rest; else look at names, shapes, dtypes and sizes only.
            timeout_s: for a writer to finish.
            on_bytes: told how many more bytes were digested, by several threads.

        Raises:
            DigestMismatch: bytes at rest were changed by something else; names the tensors (F14).
            FormatError: a file was cut off or replaced.
        """
        started_s = time.perf_counter()
        with self.reading(timeout_s=timeout_s) as folder_path:
            state, schema = self._bound_state(), self.schema
            folder = SafetensorsFolder.open(folder_path)
            check_fit(folder, schema, self._allow_extra)
            with Weights(folder, schema, writable=False) as weights:
                if full:
                    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                        check_rest(self.path, state, wrong_tensors(weights, schema, state.digests, pool, on_bytes))
                return VerifyReport(
                    version=state.version,
                    num_tensors=len(state.digests),
                    size_bytes=weights.size_bytes if full else 0,
                    seconds=time.perf_counter() - started_s,
                )

    def register_consumer(self, consumer_id: str, *, version: int | None = None) -> Consumer:
        """Keep patches above `version` for an engine of this host until it has applied them or its process ends.

        Call it inside `reading()`, so that no patch can come and go between loading the weights and registering.

        Args:
            consumer_id: names the engine; one live consumer per name.
            version: it has already, by default the checkpoint's.
        """
        if version is None:
            version = self._bound_state().version
        return Consumer(self._layout.consumers, consumer_id, version)

    def patch(self, version: int) -> Patch:
        """The absolute patch from `version - 1` to `version`, as slices by tensor.

        Raises:
            ChainError: it was not applied here yet, or is no longer kept; reload from the checkpoint instead.
        """
        return self.patches(version - 1, version)[0]

    def patches(self, since: int, version: int | None = None) -> list[Patch]:
        """The absolute patches that lead from version `since` to `version`, to be applied in order.

        One per version while a consumer is registered. A follower without consumers may have merged several into one,
        which then leads only to the last of them.

        Args:
            since: version the caller has.
            version: it wants, by default the checkpoint's.

        Raises:
            ChainError: one was not applied here yet, is no longer kept, or was merged with others; reload from the
                checkpoint instead.
        """
        state = self._bound_state()
        version = state.version if version is None else version
        found = way(kept_patches(self._layout), since, version) if since < version <= state.version else None
        if found is not None:
            with contextlib.suppress(FileNotFoundError):
                return [
                    open_patch(self._layout.patch(kept.version, kept.since), self.schema, since=kept.since)
                    for kept in found
                ]
        missing = f"for version {version}" if since == version - 1 else f"from version {since} to {version}"
        raise ChainError(
            f"{self.path}: no patch {missing}, the checkpoint is at {state.version}; reload from it. "
            "Consumers that register keep the patches they need",
            local_version=state.version,
            missing=version,
        )

    # -- writers ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, *, timeout_s: float | None = None, purpose: str = "write") -> Iterator[Session]:
        """Be the one writer of this checkpoint; what a dead writer left is finished or forgotten first.

        Raises:
            CheckpointBusy: another process writes and `timeout_s` is 0; names it.
            DeadlineExceeded: the same after `timeout_s` seconds.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        lock = FileLock(self._layout.writer_lock, purpose)
        lock.acquire(exclusive=True, timeout_s=timeout_s)
        try:
            with self._weights_lock:
                weights, self._weights = self._weights, None
            session = Session(
                self._layout,
                self._states,
                weights=weights,
                allow_extra=self._allow_extra,
                patch_budget_bytes=self._patch_budget_bytes,
                timeout_s=max(0.0, deadline - time.monotonic()),
                fsync=self._fsync,
            )
            try:
                recover(session)
                fill(session, self.base)
                yield session
            finally:
                with self._weights_lock:
                    self._weights = session.close()
        finally:
            lock.release()

    def apply(self, prepared: Prepared, *, timeout_s: float | None = None) -> None:
        """Write one prepared version; see `Session.apply`. `Follower.apply_to` does this and everything before it."""
        with self.writing(timeout_s=timeout_s, purpose=f"apply version {prepared.version}") as session:
            session.apply(prepared)

    def close(self) -> None:
        """Close files and mappings; the checkpoint itself stays, and the object can be used again."""
        with self._weights_lock:
            weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()
        self._states.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalCheckpoint({str(self.path)!r}, version={self.version})"
