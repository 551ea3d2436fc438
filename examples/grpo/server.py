"""A vLLM server for an example that was not given one: started here, ended here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_START_S = 300.0


@contextmanager
def server(model: str, out: Path) -> Iterator[str]:
    """Serve `model` on a free port of this machine while the block runs; yields its URL. Its log is in `out`."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--max-num-seqs", "32"),
        *("--weight-transfer-config", json.dumps({"backend": "torch_delta"})),
        *("--logprobs-mode", "processed_logprobs", "--enforce-eager"),
    ]
    environment = os.environ | {
        "VLLM_PLUGINS": "torch_delta",  # our routes
        "VLLM_SERVER_DEV_MODE": "1",  # what TRL itself asks the server
        "TORCH_DELTA_CHECKPOINT_ROOT": str(out / "server"),
        "TORCH_DELTA_ALLOWED_PATHS": str(out),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    print(f"starting vllm serve on port {port}, log in {out / 'server.log'} (about a minute on a CPU)", flush=True)
    with (out / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _await_health(url, process, out)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_health(url: str, process: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    tail = (out / "server.log").read_bytes()[-3000:].decode(errors="replace")
    sys.exit(f"the server did not start within {_START_S:.0f} s:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
