"""The launch commands of examples/skyrl_delta: what they would start, parsed by SkyRL's own configuration."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_delta_skyrl import registering

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.usefixtures("seat")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "skyrl_delta"
INSTEAD_OF_PYTHON = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def launch(script: str, folder: Path, *arguments: str, **environment: str) -> tuple[str, Any, dict[str, str]]:
    """The entry point a script starts, the configuration SkyRL makes of its arguments, and the environment."""
    from skyrl.train.config.config import SkyRLTrainConfig

    program = folder / "python"
    program.write_text(INSTEAD_OF_PYTHON)
    program.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_DELTA", "RAY_"))}
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        env={**clean, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (flag, module, *overrides), said = json.loads(done.stdout)
    assert flag == "-m"
    return module, SkyRLTrainConfig.from_cli_overrides(overrides), said


def expect_the_hook(said: dict[str, str]) -> None:
    assert said[registering.ENABLED] == "1"
    module, _, name = said[registering.RAY_HOOK].rpartition(".")
    assert getattr(importlib.import_module(module), name) is registering.ray_hook


@pytest.mark.parametrize("url", ["/mnt/shared/run", "s3://bucket/prefix/run", "gs://bucket/prefix/run"])
def test_one_cluster(tmp_path: Path, url: str) -> None:
    module, config, said = launch("run_gsm8k.sh", tmp_path, "trainer.epochs=2", SYNC_DIR=url, HOME="/home/somebody")
    assert importlib.util.find_spec(module) is not None
    engines = config.generator.inference_engine
    assert (engines.weight_sync_backend, engines.delta_weight_sync.sync_dir) == ("delta", url)
    assert engines.run_engines_locally
    assert not config.trainer.placement.colocate_all
    assert config.trainer.epochs == 2, "further options follow"
    assert config.data.train_data == ["/home/somebody/data/gsm8k/train.parquet"]
    expect_the_hook(said)


def test_two_clusters(tmp_path: Path) -> None:
    url = "s3://bucket/prefix/run"
    module, config, said = launch("serve.sh", tmp_path, SYNC_DIR=url)
    assert importlib.util.find_spec(module) is not None
    served = config.trainer.policy.model.path
    assert config.generator.inference_engine.run_engines_locally
    expect_the_hook(said)
    _, config, said = launch(
        "run_gsm8k.sh",
        tmp_path,
        SYNC_DIR=url,
        EXTERNAL_PROXY_URL="http://a:9",
        EXTERNAL_SERVER_URLS="[http://a:8000,http://a:8100]",
    )
    engines = config.generator.inference_engine
    assert not engines.run_engines_locally
    assert (engines.external_proxy_url, engines.external_server_urls) == (
        "http://a:9",
        ["http://a:8000", "http://a:8100"],
    )
    assert config.trainer.policy.model.path == served, "both clusters start from one checkpoint"
    expect_the_hook(said)


@pytest.mark.parametrize("script", ["run_gsm8k.sh", "serve.sh"])
def test_a_script_without_a_stream_says_what_it_needs(script: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "SYNC_DIR"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / script)], env=clean, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "SYNC_DIR" in done.stderr
