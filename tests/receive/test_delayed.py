"""A store that shows an object late, "not found" just after it was put: never mixed weights, never without an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import ChainError, ObjectNotFound, TorchDeltaError
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store import open_store
from torch_delta.testing.faults import Fault, FaultyStore, fail_before

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from tests.receive.handmade import Trainer


def not_yet(operation: str, key: str, *, times: int | None = 2) -> Fault:
    return Fault(operation, key, effect=fail_before(ObjectNotFound("not yet", key=key)), times=times)


@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ("get", "stream.json"),
        ("get", "commits/*01.json"),
        ("get", "commits/*02.json"),
        ("get", "parts/*02/00001-*"),
    ],
)
def test_what_is_seen_late_is_waited_for(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator, operation: str, key: str
) -> None:
    # F96, F103
    for _ in range(2):
        trainer.step(rng)
    store = FaultyStore(open_store(str(trainer.root)), [not_yet(operation, key)])
    checkpoint = LocalCheckpoint(place, base=base)
    with Follower(store, poll_interval_s=0.01, most_poll_interval_s=0.02) as follower:
        reports = list(follower.apply_to(checkpoint, until=2, timeout_s=30))
    store.assert_fired()
    assert [report.version for report in reports][-1] == 2
    trainer.assert_at(place, 2)


@pytest.mark.parametrize(("operation", "key"), [("get", "parts/*02/00001-*"), ("get", "commits/*02.json")])
def test_what_never_comes_is_an_error_in_time_that_names_it(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator, operation: str, key: str
) -> None:
    # rules R3, R5, R6: version 1 stays, whole
    for _ in range(2):
        trainer.step(rng)
    store = FaultyStore(open_store(str(trainer.root)), [not_yet(operation, key, times=None)])
    checkpoint = LocalCheckpoint(place, base=base)
    with (
        Follower(store, poll_interval_s=0.01, most_poll_interval_s=0.02) as follower,
        pytest.raises(TorchDeltaError) as caught,
    ):
        list(follower.apply_to(checkpoint, until=2, timeout_s=3))
    store.assert_fired()
    assert isinstance(caught.value, ChainError | ObjectNotFound)
    assert f"{2:020d}" in str(caught.value) or caught.value.facts["missing"] == 2
    assert store.fired()[0] > 3, "asked again"
    assert checkpoint.version == 1
    trainer.assert_at(place, 1)
