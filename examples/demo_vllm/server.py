"""`vllm serve` with our backend, as it would be started by hand, and its end with all of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Self

from examples.demo.sides import DemoFailed
from examples.demo_vllm.rollouts import Policy
from examples.demo_vllm.settings import MODEL, START_S

if TYPE_CHECKING:
    from pathlib import Path

_SHOWN_BYTES = 4000
_GRACE_S = 20.0


class Server:
    """One vLLM server for the checkpoint `out`/base; a context manager that leaves none of its processes behind.

    Args:
        out: the demo's folder; the server's log and its copy of the checkpoint go there.
    """

    def __init__(self, out: Path) -> None:
        self.key = secrets.token_hex(16)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = out / "server.log"
        arguments = {
            "weight-transfer-config": json.dumps({"backend": "torch_delta"}),
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": self.port,
            "max-model-len": 512,
            "max-num-seqs": 64,
            "kv-cache-memory-bytes": 256 << 20,
        }
        environment = os.environ | {
            "VLLM_PLUGINS": "torch_delta",  # brings the routes under /torch_delta
            "VLLM_API_KEY": self.key,
            "TORCH_DELTA_STREAM": str(out / "stream"),
            "TORCH_DELTA_CHECKPOINT_ROOT": str(out / "host"),
            # What vLLM needs on a small machine without a network; nothing of it concerns us.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(out / "base"), "--enforce-eager"]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def policy(self) -> Policy:
        """What it serves."""
        return Policy(self.url, self.key)

    def wait_until_ready(self) -> None:
        """Return when it answers.

        Raises:
            DemoFailed: it ended, or took longer than `START_S`.
        """
        deadline = time.monotonic() + START_S
        while not self.policy.is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise DemoFailed(f"the server was not ready after {START_S:g} s:\n{self._last_words()}")
            time.sleep(0.2)

    def check(self) -> None:
        """Raise `DemoFailed` if it is no longer there."""
        if self._process.poll() is not None:
            raise DemoFailed(f"the server ended with status {self._process.returncode}:\n{self._last_words()}")

    def _last_words(self) -> str:
        return self._log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace") + f"\n(all of it: {self._log})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Its session is its own, so the group is exactly what it started.
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
