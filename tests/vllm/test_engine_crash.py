"""A process that dies in the middle of an update: what it leaves behind is enough for the next one to serve exact bits.

Live weights die with their process; what must survive is the host's checkpoint, which the update reads meanwhile, and
which other engines of the host go on using.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vllm.rig import update
from torch_delta import crashpoints

if TYPE_CHECKING:
    from tests.vllm.rig import Rig

UPDATE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.vllm.rig import Rig, update
folder, base, url, mode = sys.argv[1:]
rig = Rig(Path(folder), Path(base), SimpleNamespace(url=url, version=1))
replica, _ = rig.start(unroutable={"layers.1.scale": "composed by its loader"} if mode == "mixed" else {})
rig.attached(replica)
assert rig.prepared(replica)["plan"] == ("mixed" if mode == "mixed" else "patch")
print("prepared", flush=True)
update(replica, 1, mode="reload" if mode == "reload" else "auto")
print("updated", flush=True)
"""
POINTS = [
    ("vllm.written", "patch"),
    ("vllm.reload_begun", "reload"),
    ("vllm.reload_begun", "mixed"),  # some tensors are written by then, and others are to be loaded
]


def update_and_die(rig: Rig, point: str, mode: str) -> None:
    """Bring another process to version 1, up to a crash point."""
    run = subprocess.run(
        [sys.executable, "-c", UPDATE, str(rig.root.parent), str(rig.base), rig.versions.url, mode],
        env={**os.environ, crashpoints.ENVIRONMENT: f"{point}:1:kill", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stdout) == (-9, "prepared\n"), run.stderr


@pytest.mark.parametrize(("point", "mode"), POINTS)
def test_killed_in_an_update_the_next_process_serves_exact_bits(rig: Rig, point: str, mode: str) -> None:
    rig.versions.sparse(1)
    update_and_die(rig, point, mode)
    replica, model = rig.start()
    status = rig.attached(replica)
    assert (status["version"], status["ready"]) == (None, False), "it was started from version 0, the host is at 1"
    assert rig.prepared(replica, 1)["plan"] == "reload"
    assert update(replica, 1) is None
    assert rig.same(model, 1)
    assert (replica.status()["version"], replica.status()["ready"]) == (1, True)
    rig.versions.sparse(2)
    assert rig.prepared(replica)["plan"] == "patch"
    assert update(replica, 2) is None
    assert rig.same(model, 2)


def test_an_engine_beside_the_one_that_died_goes_on(rig: Rig) -> None:
    """What a reload holds of the host's checkpoint ends with its process."""
    neighbour, model = rig.start()
    rig.attached(neighbour)
    rig.versions.sparse(1)
    update_and_die(rig, "vllm.reload_begun", "reload")
    assert rig.prepared(neighbour, 1)["plan"] == "patch"
    assert update(neighbour, 1) is None
    rig.versions.sparse(2)
    rig.prepared(neighbour)
    assert update(neighbour, 2, mode="reload") is None
    assert rig.same(model, 2)
