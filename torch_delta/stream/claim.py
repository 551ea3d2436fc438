"""One deleter at a time (rule L4, F88): numbered claims, of which the highest counts."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

from torch_delta.crashpoints import reach
from torch_delta.errors import FormatError, ObjectExists, ObjectNotFound, StoreError
from torch_delta.format.keys import CLAIMS_PREFIX, new_nonce, parse_claim_key
from torch_delta.format.lease import Claim, Lease
from torch_delta.format.limits import MAX_HINT_BYTES, MAX_INT
from torch_delta.stream.identity import read_json

if TYPE_CHECKING:
    from torch_delta.store.base import ObjectInfo, Store


class HeldClaim:
    """The right to delete, until `release`.

    Attributes:
        claim: as stored.
        now_s: the store's time when it was written, or None where the store keeps none.
    """

    def __init__(self, store: Store, claim: Claim, now_s: float | None) -> None:
        self.claim = claim
        self.now_s = now_s
        self._store = store

    def release(self) -> None:
        """Let the next one begin at once; without it they wait until the claim has lived its time."""
        done = Claim(
            number=self.claim.number,
            stream_id=self.claim.stream_id,
            seconds=self.claim.seconds,
            done=True,
            info=self.claim.info,
        )
        self._store.put_hint(done.key, done.to_bytes())


def take_claim(store: Store, stream_id: str, *, seconds: int) -> HeldClaim | str:
    """Become the one deleter.

    Args:
        store: of the stream.
        stream_id: of the stream.
        seconds: others keep away for, unless it is released before.

    Returns:
        The claim, or who holds one.

    Raises:
        StoreUnavailable: no clear answer.
    """
    found = _numbered(store)
    number = max(found, default=-1)
    info = {"host": platform.node()[:255], "pid": str(os.getpid()), "nonce": new_nonce()}
    claim = Claim(number=number + 1, stream_id=stream_id, seconds=seconds, done=False, info=info)
    holder = _holder(store, found[number], stream_id) if number >= 0 else None
    # A look at the clock of the store costs an object; only where somebody is in the way.
    if holder is not None and not _has_expired(store, found[number], holder):
        return ", ".join(f"{name} {value}" for name, value in sorted(holder.info.items()) if name != "nonce")
    try:
        store.create_or_same(claim.key, claim.to_bytes())
    except ObjectExists:
        return "somebody who claimed it at the same moment"
    reach("gc.claimed")
    for old in found.values():
        try:
            store.delete(old.key)
        except StoreError:
            break  # it is in nobody's way
    return HeldClaim(store, claim, store.stat(claim.key).modified_s)


def _numbered(store: Store) -> dict[int, ObjectInfo]:
    found = {}
    for item in store.list(CLAIMS_PREFIX):
        try:
            found[parse_claim_key(item.key)] = item
        except FormatError:
            continue
    return found


def _holder(store: Store, item: ObjectInfo, stream_id: str) -> Claim | None:
    """Who holds this claim; None if nobody does any more."""
    try:
        claim = Claim.from_bytes(read_json(store, item.key, MAX_HINT_BYTES), key=item.key)
    except (ObjectNotFound, FormatError):
        return None
    return None if claim.done or claim.stream_id != stream_id else claim


def _has_expired(store: Store, item: ObjectInfo, claim: Claim) -> bool:
    """Whether the claim has lived its time, by the store's clock: the age of an object made for the purpose tells."""
    if item.modified_s is None:
        return False
    now_s = store_now_s(store, claim.stream_id)
    return now_s is not None and now_s - item.modified_s > claim.seconds


def store_now_s(store: Store, stream_id: str) -> float | None:
    """The time by the store's clock, from an object made for the purpose; None where it keeps no times.

    Raises:
        StoreUnavailable: no clear answer, or this process may not write.
    """
    # A lease that holds nothing back and lives for a second, should this process die before it deletes it.
    probe = Lease(nonce=new_nonce(), stream_id=stream_id, version=MAX_INT, anchor=None, seconds=1)
    store.put_hint(probe.key, probe.to_bytes())
    try:
        return store.stat(probe.key).modified_s
    finally:
        store.delete(probe.key)
