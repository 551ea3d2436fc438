"""The store interface: named byte objects with create-if-absent. It knows nothing of commits.

What the rest of the package asks of a backend, in three sentences. *Atomic visibility*: an object is readable in full
or not at all, whatever happens to the process that writes it. *Mutual exclusion*: of any number of concurrent `put_new`
for one key, exactly one succeeds. *Read after create*: once `put_new` returned, every `get`, `stat` and `list` that
starts afterwards sees the object.

A store never guesses. "There is no such object" is `ObjectNotFound`, "the name is taken" is `ObjectExists`, and
everything that is not a clear answer (network, disk full, permissions) is `StoreUnavailable`, whose fact `outcome` says
what is known of a write: ``"absent"`` (certainly not written) or ``"unknown"`` (it may have been).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from torch_delta.errors import ObjectExists, StoreError, StoreUnavailable
from torch_delta.store.sibling import sibling_url

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

BytesLike: TypeAlias = bytes | bytearray | memoryview
Data: TypeAlias = BytesLike | Iterable[BytesLike]

_COMPARE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of an object without reading it.

    Attributes:
        key: the object's name.
        size_bytes: its length.
        modified_s: creation time, seconds since the epoch *by the store's clock*, or None where the store keeps none.
            Good for ages against other objects of the same store, never for comparison with this host's clock.
    """

    key: str
    size_bytes: int
    modified_s: float | None = None


class Created(enum.Enum):
    """How `Store.create_or_same` ended; both members mean that the object is there with exactly our bytes."""

    NEW = "new"  # this call created it
    SAME = "same"  # it was there with identical bytes: an earlier attempt whose reply was lost, or an equal writer


class Store(ABC):
    """Named byte objects under one root.

    Who calls what. The publisher: `put_new` for parts, anchors and the schema from its background threads,
    `create_or_same` for a commit from one thread of rank 0, then `put_hint`. Followers: `stat` to poll, `get`,
    `get_range` and `open_local` from several threads at once. Retention and the command line: `list`, `delete`,
    `sweep_temporary`. Nothing is ever called inside a training step.

    Threads: every method may be called from any thread at any time, `close` included; a call that runs while the store
    is closed either finishes or raises `StoreUnavailable`. Ranks: every process opens its own store.

    Data: buffers handed to a put may be reused as soon as the call returns; bytes handed out belong to the caller.

    Keys follow the grammar of docs/format.md and are checked by every method before the backend is asked: a key that
    breaks it raises `FormatError`, also on read, because keys come from manifests that somebody else wrote.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The root in the form that `open_store` accepts; it names the store in every error and never holds secrets."""

    @abstractmethod
    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object.

        Args:
            key: its name.
            max_bytes: refuse a longer object before reading it, so that a hostile or damaged one costs no memory.

        Raises:
            ObjectNotFound: there is none.
            FormatError: it is longer than `max_bytes`.
            StoreUnavailable: no clear answer.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from byte `start`.

        Raises:
            ObjectNotFound: there is no such object.
            FormatError: the object ends before ``start + length``; never a short answer.
            StoreUnavailable: no clear answer.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Facts of one object; the cheapest way to ask whether it exists.

        Raises:
            ObjectNotFound: there is none.
            StoreUnavailable: no clear answer.
        """

    @abstractmethod
    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """All finished objects below a folder, ascending by the bytes of their keys, at any depth.

        Objects created or deleted while the iterator runs may or may not appear. Pages are fetched as needed, so an
        error can come in the middle: what was seen so far is then not the whole answer.

        Args:
            prefix: ``""`` or a folder with its closing slash, ``"commits/"``. A prefix inside a name is not supported.
            start_after: yield only keys greater than this one (need not exist).

        Raises:
            StoreUnavailable: the listing could not be completed. An error is never an empty listing.
        """

    @abstractmethod
    def put_new(self, key: str, data: Data) -> ObjectInfo:
        """Create an object that must not exist yet. When this returns, the object is durable and visible.

        There is deliberately no default built from `stat` and a write: only a backend can make this exclusive.

        Args:
            key: its name.
            data: the bytes, or an iterable of pieces that are written in order and never joined. An iterable is
                consumed at most once, so after an error the caller may only repeat the call with fresh pieces. Streamed
                objects must carry a nonce of 16 hex digits in their name: a backend without conditional uploads for
                large objects looks for an existing one first and then uploads without exclusion, and refuses other
                names.

        Raises:
            ObjectExists: the name is taken, by whatever bytes, and certainly not by this call. A backend that loses the
                reply to its own create and can *prove* that the object is this call's returns normally.
            StoreUnavailable: no clear answer; `outcome` is ``"absent"`` or ``"unknown"``.
            ValueError: it would have to be streamed to a backend that cannot do so exclusively, and its name holds no
                nonce; nothing was written.
            BaseException: whatever `data` raised; nothing is visible then, and nothing is left but perhaps a temporary.
        """

    @abstractmethod
    def put_hint(self, key: str, data: BytesLike) -> None:
        """Create or overwrite a small object that nothing may depend on.

        Readers see the old bytes or the new ones, never a mixture. It may be lost or go back in time when a machine
        fails; that is why it is only a hint.

        Raises:
            StoreUnavailable: no clear answer; old or new bytes are in place.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; removing one that is not there succeeds. When this returns the removal is durable.

        Raises:
            StoreUnavailable: no clear answer; it may or may not be gone.
        """

    def open_local(self, key: str) -> Path | None:
        """Where the object lies as a plain file of this machine, or None if this store is not a directory.

        For readers that would otherwise copy gigabytes. The file never changes, but retention may unlink it at any
        moment, and on network file systems a mapped file that is truncated by another host kills the reader: read it,
        or map it only if it is on a local disk.

        Raises:
            ObjectNotFound: the store is a directory and there is no such object.
        """
        del key
        return None

    def copy(self, source: str, key: str) -> ObjectInfo | None:
        """Create an object with the bytes of one that is there, inside the store: they do not pass through this host.

        The two have lives of their own: deleting one does not touch the other, and the new one is as young as if it
        had been put. As with streamed puts, `key` must carry a nonce: a backend may look first and copy without
        exclusion.

        Args:
            source: name of the object to copy.
            key: name of the new one.

        Returns:
            Facts of the new object, or None if this store cannot copy this one; then nothing happened.

        Raises:
            ObjectNotFound: there is no such source.
            ObjectExists: the name is taken.
            StoreUnavailable: no clear answer; `outcome` is ``"absent"`` or ``"unknown"``.
        """
        del source, key
        return None

    def sibling(self, root: str) -> Store:
        """An open store beside this one, with the same settings; the caller closes it.

        A store with settings that its URL does not tell (limits, a client of its own) overrides this.

        Args:
            root: keys joined by slashes, relative to the folder this store's root lies in.

        Raises:
            FormatError: `root` would lead out of that folder.
            TorchDeltaError: this store lies in no folder: it is a whole bucket.
        """
        from torch_delta.store.url import open_store

        return open_store(sibling_url(self.url, root))

    def sweep_temporary(self, *, older_than_s: float) -> int:
        """Remove what puts that never finished left behind, if it has not been touched for `older_than_s` seconds.

        Called by retention, by one process at a time. Age is measured by the store's clock.

        Returns:
            How many leftovers were removed.
        """
        del older_than_s
        return 0

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release connections. May be called twice."""

    def create_or_same(self, key: str, data: BytesLike | tuple[BytesLike, ...]) -> Created:
        """Create an object, or find that it is there with exactly these bytes: `put_new` that can be repeated.

        This is how a commit is made, and how any put is repeated after an unknown outcome. The rule for callers: equal
        bytes count as one's own only if they *are* one's own, so they must hold something no other writer would write
        (a nonce in the bytes or in the key).

        Args:
            key: its name.
            data: the bytes, or a tuple of pieces (a tuple, because pieces may be read twice).

        Returns:
            `Created.NEW` or `Created.SAME`; in both cases the object is there with these bytes.

        Raises:
            ObjectExists: the name is taken by other bytes.
            StoreUnavailable: no clear answer, even after reading back; repeat the call to find out.
        """
        failure: StoreError
        try:
            self.put_new(key, data)
        except ObjectExists as taken:
            same, failure = self._holds(key, data), taken
        except StoreUnavailable as lost:
            if getattr(lost, "outcome", "unknown") != "unknown":
                raise
            try:
                same, failure = self._holds(key, data), lost
            except StoreError:
                # Absent now, or no answer again. Absent is no proof either: a delayed create may still land. The caller
                # repeats, and the next read-back decides.
                raise lost from None
        else:
            return Created.NEW
        if not same:
            raise ObjectExists(
                f"{self.url}: {key} was created by another writer with other bytes",
                key=key,
                url=self.url,
                operation="create_or_same",
            ) from failure
        self._make_durable(key)
        return Created.SAME

    def _holds(self, key: str, data: BytesLike | tuple[BytesLike, ...]) -> bool:
        """Whether the object has exactly these bytes; compared in bounded blocks."""
        pieces = list(views(data))
        if self.stat(key).size_bytes != sum(len(piece) for piece in pieces):
            return False
        position = 0
        for piece in pieces:
            for begin in range(0, len(piece), _COMPARE_BYTES):
                block = piece[begin : begin + _COMPARE_BYTES]
                if self.get_range(key, position, len(block)) != block:
                    return False
                position += len(block)
        return True

    def _make_durable(self, key: str) -> None:  # noqa: B027 - most backends have nothing to do
        """Make sure an object that is visible stays so: its creator may have died before it could."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def views(data: Data) -> Iterator[memoryview]:
    """The pieces of `data` as flat byte views, in order, without copying.

    Raises:
        TypeError: a piece is not contiguous bytes (a strided view, a string).
    """
    for piece in (data,) if isinstance(data, bytes | bytearray | memoryview) else data:
        view = memoryview(piece)
        if view.nbytes:  # an empty view of another format cannot be cast
            yield view.cast("B")
