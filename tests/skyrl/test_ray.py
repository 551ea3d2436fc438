"""Real Ray on loopback: a driver, two trainer actors under gloo FSDP2, the hook alone to take the seat, real copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skyrl import ranks
from tests.skyrl.checkpoints import read_bits, same
from tests.skyrl.receivers import Receiver

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(500)]

ROOT = Path(__file__).resolve().parents[2]


def test_two_ray_actors_train_and_send_with_nothing_but_the_environment(tmp_path: Path) -> None:
    base = ranks.write_base(tmp_path / "base")
    with Receiver(tmp_path / "host") as server:
        environment = dict(
            os.environ,
            TORCH_DELTA_SKYRL="1",
            RAY_RUNTIME_ENV_HOOK="torch_delta_skyrl.registering.ray_hook",
            RAY_DISABLE_IMPORT_WARNING="1",
            RAY_USAGE_STATS_ENABLED="0",
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(ROOT),
        )
        command = [sys.executable, "-m", "tests.skyrl.ray_driver", str(base), str(tmp_path), server.url]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=450, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        assert "engines: torch_delta_skyrl.trainer torch_delta_skyrl.trainer" in done.stdout
        assert server.version == 3
        assert same(server.loaded, read_bits(tmp_path / "model-3")) == []
