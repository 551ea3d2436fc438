"""SkyRL's own server (its standalone entry point) on a CPU, in processes of its own.

Real vLLM with SkyRL's routes and worker extension; nothing but the environment puts our engine into its seat.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.vllm import servers

if TYPE_CHECKING:
    from collections.abc import Mapping

_INSIDE = "skyrl.backends.skyrl_train.inference_servers"
_ROOT = Path(__file__).resolve().parents[2]
_STARTUP = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"


def serving(folder: Path, *, log: Path, environment: Mapping[str, str], num_ranks: int = 1) -> servers.Server:
    """Start a server for a tiny checkpoint; a context manager, ready when it returns.

    Args:
        folder: checkpoint to serve.
        log: file for its output; a folder beside it is made.
        environment: more variables of the process.
        num_ranks: tensor-parallel ranks.
    """
    options = {
        "weight-transfer-config": json.dumps({"backend": "delta"}),
        "worker-extension-cls": f"{_INSIDE}.new_inference_worker_wrap.NewInferenceWorkerWrap",
        "worker-cls": "vllm.v1.worker.cpu_worker.CPUWorker",  # the entry point takes any machine for one with GPUs
        "tensor-parallel-size": num_ranks,
        "max-model-len": 1024,
        "model": folder,
    }
    original = servers.command

    def command(folder: Path, port: int, **_: Any) -> list[str]:
        flags = original(folder, port, delta=False, options=options)[5:]
        return [sys.executable, "-m", f"{_INSIDE}.vllm_server_actor", *flags]

    # Before anything else in every process, spawned ones too: SkyRL asks for Python 3.12, where one name has grown.
    startup = log.parent / f"{log.stem}-startup"
    startup.mkdir()
    (startup / "sitecustomize.py").write_text(_STARTUP)
    variables = {
        "TORCH_DELTA_SKYRL": "1",
        "PYTHONPATH": f"{startup}{os.pathsep}{_ROOT}",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(num_ranks))) if num_ranks > 1 else "nobind",
    }
    with mock.patch.object(servers, "command", command):
        return servers.Server(folder, log=log, plugin=False, dev=True, environment={**variables, **environment})
