"""A publisher that is killed at every point of a version: what was committed is there, nothing else is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, edit, edited, initial, same, write_checkpoint
from tests.publish.support import config
from torch_delta import crashpoints
from torch_delta.publish import attach_source
from torch_delta.store import LocalStore
from torch_delta.stream import Stream

if TYPE_CHECKING:
    from pathlib import Path

# Where anchors and lineages are written; tests of those kill there (test_background_anchors, test_restart).
ELSEWHERE = {
    "publish.anchor_staged",
    "publish.anchor_file_put",
    "publish.anchor_manifest_put",
    "publish.fork_noted",
    "publish.lineage_created",
    "publish.successor_written",
}
ONE_VERSION = sorted(
    {point for point in crashpoints.POINTS - ELSEWHERE if point.startswith("publish.")}
    | {"stream.commit_written", "stream.head_written"}
)
COMMITTED = {"stream.commit_written", "stream.head_written", "publish.committed"}

PUBLISH = """
import sys
from pathlib import Path
from tests.publish.test_killed import publish
publish(Path(sys.argv[1]), [1, 2, 3])
"""


def publish(folder: Path, seeds: list[int], before: tuple[int, ...] = ()) -> int:
    """Attach at the state after `before` and publish one version per seed; the version attached at."""
    source = ArraySource(state=edited(before))
    with attach_source(source, str(folder / "s"), base=folder / "base", config=config()) as publisher:
        version = publisher.version
        for seed in seeds:
            edit(source, seed)
            publisher.publish()
            publisher.wait()
    return version


@pytest.mark.parametrize("point", ONE_VERSION)
def test_killed_in_the_second_version(tmp_path: Path, point: str) -> None:
    # rules W3, W6, K7; F01, F02, F05
    write_checkpoint(tmp_path / "base", initial())
    # A hint is written at the attach too (a sign of life), so only what a version alone passes is counted in versions.
    run = subprocess.run(
        [sys.executable, "-c", PUBLISH, str(tmp_path)],
        env={**os.environ, crashpoints.ENVIRONMENT: f"{point}:2:kill", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == -9, run.stderr
    head = Stream(LocalStore(tmp_path / "s")).head()
    if point == "stream.head_written":
        assert head in {0, 1, 2}
    else:
        assert head == (2 if point in COMMITTED else 1)
    states = reader.replay(tmp_path / "s", initial())
    assert len(states) == 1 + head
    for version, state in enumerate(states):
        assert same(state, edited(range(1, version + 1)))
    # The trainer starts again, from what it last heard was committed, and goes on in the same stream.
    assert publish(tmp_path, [7], before=tuple(range(1, head + 1))) == head
    states = reader.replay(tmp_path / "s", initial())
    assert same(states[head + 1], edited([*range(1, head + 1), 7]))
    assert not (tmp_path / "s" / "successor.json").exists()
