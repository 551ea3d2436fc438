"""Trainers that start again, servers that come late, versions that are gone, bytes that are damaged."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.skyrl.checkpoints import bits_of, same, write
from tests.skyrl.receivers import Receiver
from tests.skyrl.toys import Run, step, toy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.usefixtures("seat")]


def bring(late: Receiver, run: Run, version: int) -> None:
    """What SkyRL's client asks of one server for one version."""
    late.handle("/init_weight_transfer_engine", run.server.bodies[0])
    late.handle("/fetch_weights", {"target_version": version, "sync_dir": str(run.stream)})
    late.handle("/pause", None)
    late.handle("/start_weight_update", None)
    late.handle("/update_weights", {"update_info": {"target_version": version}})


def again(run: Run, tensors: dict[str, Any]) -> Run:
    """The same run with a trainer that starts again, on another host, with these weights."""
    second = Run(run.folder / "again", tensors, run.base, sync_dir=run.stream, server=run.server)
    assert second.engine.version == 0
    return second


def test_a_trainer_that_starts_again_at_the_newest_version_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, toy())
    step(run.tensors, 1)
    run.send()
    run.end()
    second = again(run, {name: tensor.clone() for name, tensor in run.tensors.items()})
    assert second.send() == 2
    step(second.tensors, 2)
    assert second.send() == 3
    assert same(run.server.loaded, bits_of(second.tensors)) == []
    second.close()


def test_a_trainer_that_starts_again_from_an_older_checkpoint_goes_on_counting(tmp_path: Path) -> None:
    run = Run(tmp_path, toy())
    old = {name: tensor.clone() for name, tensor in run.tensors.items()}
    for number in range(3):
        step(run.tensors, number)
        run.send()
    run.end()
    step(old, 9)
    second = again(run, old)
    assert second.send() == 4
    assert same(run.server.loaded, bits_of(old)) == []
    step(old, 10)
    assert second.send() == 5
    assert same(run.server.loaded, bits_of(old)) == []
    with Receiver(tmp_path / "late") as late:
        bring(late, run, 5)
        assert same(late.loaded, bits_of(old)) == []
    second.close()


def test_a_run_that_starts_from_a_trained_checkpoint_sends_the_difference(tmp_path: Path) -> None:
    tensors = toy()
    base = write(tmp_path / "base", tensors)
    step(tensors, 1)
    run = Run(tmp_path, tensors, base)
    assert run.send() == 1
    assert run.engine.report.num_changed > 0
    assert same(run.server.loaded, bits_of(tensors)) == []
    run.close()


def test_a_late_server_starts_at_an_anchor_where_old_versions_are_gone(tmp_path: Path) -> None:
    run = Run(tmp_path, toy())
    for number in range(4):
        step(run.tensors, number)
        run.send()
    run.engine._publisher._publisher.anchor()
    step(run.tensors, 9)
    assert run.send() == 5
    from torch_delta.store import open_store
    from torch_delta.stream import Stream

    store = open_store(str(run.stream))
    stream = Stream(store)
    commits = sorted(path for path in run.stream.rglob("*") if path.is_file() and "commit" in str(path))
    assert len(commits) == 5, commits
    assert stream.head() == 5
    for path in commits[:3]:
        path.unlink()
    store.close()
    with Receiver(tmp_path / "late") as late:
        bring(late, run, 5)
        assert same(late.loaded, bits_of(run.tensors)) == []
        assert any(report.kind == "anchor" for report in late.reports)
    run.close()


def test_a_damaged_payload_changes_no_server_and_is_taken_once_it_is_whole(tmp_path: Path) -> None:
    run = Run(tmp_path, toy())
    run.send()
    before = {path for path in run.stream.rglob("*") if path.is_file()}
    step(run.tensors, 1)
    run.send()
    (part,) = [p for p in run.stream.rglob("*") if p.is_file() and p not in before and "part" in str(p)]
    whole = part.read_bytes()
    part.write_bytes(whole[:-9] + bytes(9))
    with Receiver(tmp_path / "late") as late:
        with pytest.raises(Exception, match=r"part|digest|checksum|sha256"):
            bring(late, run, 2)
        assert late.loaded is None
        part.write_bytes(whole)
        bring(late, run, 2)
        assert same(late.loaded, bits_of(run.tensors)) == []
    run.close()


def test_streams_whose_urls_are_long_and_alike_stay_apart(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 90) / ("b" * 90)
    first = Run(tmp_path / "one", toy(1), sync_dir=long / ("run-" + "c" * 120 + "-1"), shared=False)
    second = Run(tmp_path / "two", toy(2), sync_dir=long / ("run-" + "c" * 120 + "-2"), shared=False)
    for run in (first, second):
        step(run.tensors, 3)
        run.send()
    assert same(first.server.loaded, bits_of(first.tensors)) == []
    assert same(second.server.loaded, bits_of(second.tensors)) == []
    first.close()
    second.close()
    shutil.rmtree(long)
