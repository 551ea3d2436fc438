"""From the receipts of all ranks to the commit of a version, or to the error that names the ranks that failed it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.errors import DeadlineExceeded, PublishFailed, TorchDeltaError
from torch_delta.format.commit import Commit
from torch_delta.format.digest import state_sha256
from torch_delta.format.keys import new_nonce
from torch_delta.publish.coverage import Ownership
from torch_delta.publish.keyvalue import await_value, delete_blob
from torch_delta.publish.pipeline import receipt_key
from torch_delta.publish.records import Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_delta.config import PublishConfig
    from torch_delta.format.digest import Digest
    from torch_delta.publish.coordination import Team
    from torch_delta.publish.coverage import TensorBox
    from torch_delta.publish.progress import Lineage, Order


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A version that is ready to be committed."""

    commit: Commit
    digests: list[Digest]
    """Of the version, of every data tensor in schema order."""
    receipts_s: float
    """How long the ranks were waited for."""
    started: float = field(default_factory=time.perf_counter)


class Drafting:
    """Hears all ranks and proves that what they say fits together. Used by the coordinator's thread alone.

    Args:
        team: rank 0's view of the ranks.
        ownership: who owns what, proved.
        config: deadlines.
        is_stopped: ends a wait for a rank early.
    """

    def __init__(self, team: Team, ownership: Ownership, config: PublishConfig, is_stopped: Callable[[], bool]) -> None:
        self.heard_by_all = 0
        """So many outcomes every rank had heard when it sent its last receipt."""
        self._team = team
        self._ownership = ownership
        self._config = config
        self._is_stopped = is_stopped

    def draft(self, order: Order, lineage: Lineage) -> Draft:
        """Wait for every rank's receipt of a version and make its commit.

        Raises:
            PublishFailed: a rank failed, is silent, or sent what it does not own; names all such ranks.
        """
        started = time.perf_counter()
        receipts = self._receipts(order)
        self._learn_ownership(order, lineage, receipts)
        failures: dict[int, str] = {}
        increments: dict[int, Digest] = {}
        for rank, receipt in receipts.items():
            objection = self._ownership.objection(rank, ((s.tensor, s.box) for s in receipt.slices))
            if objection is not None:
                failures[rank] = objection
            for record in receipt.slices:
                known = increments.get(record.tensor)
                increments[record.tensor] = record.increment if known is None else known + record.increment
        if failures:
            raise failed(order.version, failures)
        digests = [
            digest + increments[tensor] if tensor in increments else digest
            for tensor, digest in zip(lineage.schema.data_indices, lineage.digests, strict=True)
        ]
        parts = tuple(sorted((part for r in receipts.values() for part in r.parts), key=lambda part: part.key))
        commit = Commit(
            stream_id=lineage.stream_id,
            version=order.version,
            parent_sha256=lineage.parent_sha256,
            schema_id=lineage.schema.id,
            required_features=self._config.required_features,
            parts=parts,
            state_sha256=state_sha256(digests),
            num_changed=sum(part.num_changed for part in parts),
            # Two writers that publish the same changes, or none, must not take each other's commit for their own.
            info={"writer": "torch_delta", "step": str(order.step), "nonce": new_nonce()},
        )
        return Draft(commit=commit, digests=digests, receipts_s=time.perf_counter() - started)

    def _receipts(self, order: Order) -> dict[int, Receipt]:
        deadline = time.monotonic() + self._config.receipt_timeout_s
        receipts: dict[int, Receipt] = {}
        failures: dict[int, str] = {}
        for rank in range(self._team.world_size):
            key = receipt_key(order.epoch, order.version, rank)
            try:
                data = await_value(
                    self._team.kv,
                    key,
                    timeout_s=max(deadline - time.monotonic(), 0.0),
                    phase=f"receipt for version {order.version}",
                    peer=f"rank {rank}",
                    is_stopped=self._is_stopped,
                )
            except DeadlineExceeded:
                failures[rank] = (
                    f"no receipt for version {order.version} within {self._config.receipt_timeout_s:g} s: the rank "
                    "died, did not publish this version, or is still encoding and uploading"
                )
                continue
            delete_blob(self._team.kv, key, len(data))
            receipt = Receipt.from_bytes(data)
            if receipt.error is not None:
                failures[rank] = f"{type(receipt.error).__name__}: {receipt.error.message}"
            receipts[rank] = receipt
        if failures:
            raise failed(order.version, failures)
        self.heard_by_all = min(receipt.num_heard for receipt in receipts.values())
        return receipts

    def _learn_ownership(self, order: Order, lineage: Lineage, receipts: dict[int, Receipt]) -> None:
        """A capture whose parameters were replaced before its first step owns other boxes than it said."""
        if all(receipt.owned is None for receipt in receipts.values()):
            return
        changed: dict[int, tuple[TensorBox, ...]] = dict(self._ownership.by_rank)
        changed.update({rank: r.owned for rank, r in receipts.items() if r.owned is not None})
        try:
            self._ownership = Ownership(lineage.schema, changed, constant=self._ownership.constant)
        except TorchDeltaError as error:
            raise failed(order.version, {0: error.message}) from error


def failed(version: int, failures: Mapping[int, str]) -> PublishFailed:
    """The error of a version that is not committed.

    Args:
        version: its number.
        failures: what went wrong, by rank.
    """
    told = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    return PublishFailed(
        f"version {version} was not committed: {told}. Nothing is lost: the next version covers the same changes",
        version=version,
        failures=dict(sorted(failures.items())),
    )
