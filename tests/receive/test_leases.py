"""A follower with a lease: retention leaves alone what it needs, while it lives and no longer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import DeadlineExceeded, StoreUnavailable
from torch_delta.format.lease import Lease
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store import LocalStore, open_store
from torch_delta.stream import Stream
from torch_delta.stream.collect import collect_garbage
from torch_delta.testing.faults import Fault, FaultyStore, call, fail_before

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from tests.receive.handmade import Trainer


def leases(trainer: Trainer) -> list[Lease]:
    store = LocalStore(trainer.root)
    return [Lease.from_bytes(store.get(item.key), key=item.key) for item in store.list("leases/")]


def grow(trainer: Trainer, num: int, anchors: tuple[int, ...], rng: np.random.Generator) -> None:
    for _ in range(num):
        trainer.step(rng)
        if trainer.version in anchors:
            trainer.anchor(trainer.version)


def test_eager_retention_does_not_overtake_a_slow_reader(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # rule L2; F87: everything is deleted that may be, whenever the reader fetches a part
    checkpoint = LocalCheckpoint(place, base=base)
    grow(trainer, 8, (2, 4, 6), rng)
    collected = []
    store = FaultyStore(
        open_store(str(trainer.root)),
        [
            Fault(
                "get",
                "parts/*",
                nth=nth,
                effect=call(lambda: collected.append(collect_garbage(Stream(LocalStore(trainer.root))))),
            )
            for nth in (1, 3, 5)
        ],
    )
    with Follower(store, lease_s=60, merge_from=None) as follower:
        seen = [(report.kind, report.version) for report in follower.apply_to(checkpoint, until="head", timeout_s=20)]
        assert [lease.version for lease in leases(trainer)] == [7]
    store.assert_fired()
    assert seen == [("delta", version) for version in range(1, 9)]
    trainer.assert_at(place, 8)
    assert [report.num_live_leases for report in collected] == [1, 1, 1]
    assert leases(trainer) == [], "nothing is held once it is closed"
    assert collect_garbage(Stream(LocalStore(trainer.root))).floor == 4


def test_an_anchor_that_is_being_read_stays(trainer: Trainer, place: Path, rng: np.random.Generator) -> None:
    # rule L2
    grow(trainer, 3, (2,), rng)

    def overtake() -> None:
        grow(trainer, 4, (4, 5, 6), rng)
        collect_garbage(Stream(LocalStore(trainer.root)))

    store = FaultyStore(
        open_store(str(trainer.root)), [Fault("get_range", "anchors/*.safetensors", effect=call(overtake))]
    )
    with Follower(store, lease_s=60, merge_from=None) as follower:
        seen = [(r.kind, r.version) for r in follower.apply_to(LocalCheckpoint(place), until=7, timeout_s=20)]
    store.assert_fired()
    assert seen[0] == ("anchor", 2)
    assert all(kind == "delta" for kind, _ in seen[1:])
    trainer.assert_at(place, 7)


def test_a_lease_is_renewed_while_a_step_takes_long(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    renewed = threading.Event()
    grow(trainer, 1, (), rng)
    store = FaultyStore(
        open_store(str(trainer.root)),
        [
            Fault("get", "parts/*", effect=call(lambda: renewed.wait(20))),
            Fault("put_hint", "leases/*", nth=2, effect=fail_before()),
            Fault("put_hint", "leases/*", nth=3, effect=call(renewed.set)),
        ],
    )
    with Follower(store, lease_s=1) as follower:
        list(follower.apply_to(LocalCheckpoint(place, base=base), until=1, timeout_s=30))
    store.assert_fired()
    assert renewed.is_set()


def test_a_reader_that_may_not_write_cannot_have_a_lease(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    grow(trainer, 1, (), rng)
    store = FaultyStore(
        open_store(str(trainer.root)), [Fault("put_hint", "leases/*", nth=n, effect=fail_before()) for n in range(1, 9)]
    )
    with Follower(store, lease_s=60, retry_s=0) as follower, pytest.raises(DeadlineExceeded) as caught:
        list(follower.apply_to(LocalCheckpoint(place, base=base), until=1, timeout_s=5))
    assert isinstance(caught.value.__cause__, StoreUnavailable)


@pytest.mark.parametrize("lease_s", [0, 604_801])
def test_leases_have_bounds(trainer: Trainer, lease_s: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 604800"):
        Follower(str(trainer.root), lease_s=lease_s)
