"""Bringing live weights to a version, inside the pause, on all ranks or on none.

    offer ──► agreed: nothing to do / writes / reload          a rank that cannot: refused everywhere, nothing written
      │
      ├─ writes: write ──► all wrote? ── yes ──► (reload of single tensors) ──► committed
      │                        └─ no ──► every rank rolls back ──► all restored? ── no ──► dirty everywhere
      └─ reload from the working copy ──► compared with it ──► committed; anything else: dirty everywhere

Runs in the worker's own thread while no forward pass does. Nothing here waits for the network but for the other ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch_delta.crashpoints import reach
from torch_delta.errors import ApplyFailed, DigestMismatch, TorchDeltaError
from torch_delta.vllm.offers import make_offer, strongest
from torch_delta.vllm.records import Failure, Prepared
from torch_delta.vllm.tensors import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.vllm.config import UpdateInfo
    from torch_delta.vllm.host import Host
    from torch_delta.vllm.host_records import Snapshot
    from torch_delta.vllm.ranks import Crew
    from torch_delta.vllm.records import Model
    from torch_delta.vllm.standing import Standing

RANKS_S = 120.0
"""Seconds a rank waits for the others inside the pause."""
_READ_S = 60.0


class Applier:
    """Applies versions for one rank.

    Args:
        standing: of the rank.
        crew: all ranks.
        model: of the rank.
    """

    def __init__(self, standing: Standing, crew: Crew, model: Model) -> None:
        self._standing = standing
        self._crew = crew
        self._model = model
        self._number = 0
        self._times: dict[str, float] = {}

    def apply(self, info: UpdateInfo) -> None:
        """Bring the live weights to the version asked for, or beyond it by a reload.

        Raises:
            TorchDeltaError: on every rank the same; the weights are what they were, or the standing says dirty.
        """
        self._number += 1
        self._times = {}
        started_s = time.perf_counter()
        standing = self._standing
        standing.num_applies += 1
        before = standing.version
        offers = self._meet("offer", make_offer(standing, info))
        failures = [offer.failure for offer in offers if offer.failure is not None]
        if failures:
            raise failures[0].error()
        how = strongest(offer.how for offer in offers)
        if how != "reload" and len({(offer.start, offer.version) for offer in offers}) > 1:
            how = "reload"  # ranks at different versions: the working copy is what they have in common
        prepared = standing.prepared.get(info.version)
        num_changed = 0
        if how in {"patch", "mixed"}:
            assert prepared is not None
            num_changed = self._write(prepared)
        if how in {"mixed", "reload"}:
            self._reload(None if how == "reload" else prepared)
        elif how == "patch":
            assert prepared is not None
            self._commit(prepared)
        standing.reports["last_apply"] = {
            "version": standing.version,
            "from_version": before,
            "kind": how,
            "seconds": time.perf_counter() - started_s,
            "num_changed": num_changed,
            **{f"{name}_s": self._times.get(name, 0.0) for name in ("agree", "write", "reload", "prove")},
        }

    def _host(self) -> Host:
        host = self._standing.host
        assert host is not None, "checked by the offer"
        return host

    # -- index writes -----------------------------------------------------------------------------------------------

    def _write(self, prepared: Prepared) -> int:
        live = self._standing.live
        assert live is not None, "a plan was made with it"
        undo, failure = None, None
        started_s = time.perf_counter()
        try:
            self._model.holds_served_files = False
            undo = live.write(prepared.plan)
            self._model.synchronize()
            reach("vllm.written")
        except Exception as error:
            failure = Failure.of("apply", error)
            torn = undo is None and not getattr(error, "undone", False)
        else:
            torn = False
        self._times["write"] = time.perf_counter() - started_s
        offers = self._meet("wrote", (failure, torn))
        failures = [found for found, _ in offers if found is not None]
        if not failures:
            return int(prepared.plan.num_elements)
        self._undo(undo, torn=torn, failure=failures[0])
        raise AssertionError("unreachable")

    def _undo(self, undo: Any, *, torn: bool, failure: Failure) -> None:
        live = self._standing.live
        assert live is not None
        if undo is not None:
            try:
                live.rollback(undo)
                self._model.synchronize()
            except Exception:
                torn = True
        if any(self._meet("undone", torn)):
            self._spoil(f"version could not be applied ({failure.message}) and not be undone on every rank")
        raise ApplyFailed(
            f"{failure.message}. {'Nothing was changed' if not self._standing.dirty else self._standing.dirty}",
            undone=not self._standing.dirty,
            **{name: value for name, value in failure.facts.items() if name != "undone"},
        )

    def _commit(self, prepared: Prepared) -> None:
        digests = dict(self._standing.digests)
        for tensor, increment in prepared.increments.items():
            digests[tensor] = digests[tensor] + increment
        self._standing.advance(prepared.version, digests)

    # -- reload -----------------------------------------------------------------------------------------------------

    def _reload(self, mixed: Prepared | None) -> None:
        """Load from the working copy; for `mixed` only what writes could not reach, if it is still at that version."""
        started_s = time.perf_counter()

        def reload() -> tuple[int, Mapping[int, Digest], dict[int, str]]:
            with self._host().reading(timeout_s=_READ_S) as snapshot:
                some = None
                if mixed is not None and snapshot.version == mixed.version:
                    some = mixed.plan.unrouted
                reach("vllm.reload_begun")
                self._model.holds_served_files = False
                self._model.reload(tensors_of(snapshot.weights, some))
                self._model.synchronize()
                if self._standing.live is not None:
                    self._standing.live.forget()
                return snapshot.version, snapshot.digests, self._prove(snapshot)

        results = self._all("reloaded", reload)
        self._times["reload"] = time.perf_counter() - started_s
        versions = {version for version, _, _ in results}
        if len(versions) > 1:
            self._spoil(f"ranks reloaded different versions: {sorted(versions)}")
            raise ApplyFailed(f"{self._standing.dirty}; update again", undone=False)
        version, digests, _ = results[self._crew.rank]
        live = self._standing.live
        if live is not None and not self._standing.proved:
            # The first comparison with known bits: what still differs is changed by its loader or by the backend.
            live.withdraw({index: reason for _, _, found in results for index, reason in found.items()})
            self._standing.proved = True
        self._standing.advance(version, digests)

    def _prove(self, snapshot: Snapshot) -> dict[int, str]:
        """Compare what was loaded with where it came from, as far as routes lead; what differs, by schema index."""
        live = self._standing.live
        if live is None:
            return {}
        started_s = time.perf_counter()
        differing = live.prove(snapshot.weights.read, cancelled=lambda: False)
        self._times["prove"] = time.perf_counter() - started_s
        if differing and self._standing.proved:
            names = [snapshot.weights.schema.tensors[index].name for index in sorted(differing)]
            raise DigestMismatch(
                f"after a reload of version {snapshot.version}, {len(names)} live tensors are not what was loaded, "
                f"such as {', '.join(names[:5])}",
                version=snapshot.version,
                tensors=tuple(names),
            )
        return differing

    def _all(self, topic: str, work: Callable[[], Any]) -> list[Any]:
        """Work that leaves nothing usable when it fails anywhere."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = Failure.of("apply", error)
        offers = self._meet(topic, (failure, result))
        failures = [found for found, _ in offers if found is not None]
        if failures:
            self._spoil(f"a reload failed: {failures[0].message}")
            raise ApplyFailed(
                f"{failures[0].message}. The weights are of no version now; the next update reloads them all",
                undone=False,
                **{name: value for name, value in failures[0].facts.items() if name != "undone"},
            )
        return [result for _, result in offers]

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _spoil(self, reason: str) -> None:
        self._standing.spoil(dirty=reason)

    def _meet(self, stage: str, offer: Any) -> list[Any]:
        started_s = time.perf_counter()
        try:
            return self._crew.exchange(f"apply/{self._number}/{stage}", offer, timeout_s=RANKS_S)
        except TorchDeltaError as error:
            # What the others did is unknown, so this rank cannot say which version the engine is at.
            self._spoil(f"the ranks lost each other: {error.message}")
            raise
        finally:
            self._times["agree"] = self._times.get("agree", 0.0) + time.perf_counter() - started_s
