"""Real `vllm serve` on CPU in a process of its own, on loopback. Needs vLLM to be installed; imports none of it.

    with Server(folder, log=tmp_path / "server.log") as server:
        server.greedy([[3, 17]])                       # tokens, through /v1/completions
        status, body = server.post("/torch_delta/prepare", {"version": 1})

Starting one takes most of a minute: share it (fixture `served`) where a test allows.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from tests.vllm.engines import ENVIRONMENT, KV_CACHE_BYTES, MAX_MODEL_LEN, PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MODEL = "tiny"
"""Name under which the checkpoint is served."""
_TAIL_BYTES = 6000
_GRACE_S = 20.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, whatever the environment says


class Server:
    """One server; ready when constructed, gone with all its processes when closed.

    Args:
        folder: checkpoint to serve.
        log: file for its output; shown when it fails to start.
        delta: whether our backend is selected.
        plugin: name our plugin in VLLM_PLUGINS, which brings the HTTP routes under /torch_delta.
        dev: VLLM_SERVER_DEV_MODE, which brings vLLM's own update routes.
        environment: more variables of the process.
        options: more arguments of `vllm serve`; `True` stands for a flag without a value, `None` takes one away.
        start_s: how long it may take to be ready.
    """

    def __init__(
        self,
        folder: Path,
        *,
        log: Path,
        delta: bool = True,
        plugin: bool = True,
        dev: bool = False,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, object] | None = None,
        start_s: float = 420.0,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        variables = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
        variables |= ({"VLLM_PLUGINS": "torch_delta"} if plugin else {}) | (
            {"VLLM_SERVER_DEV_MODE": "1"} if dev else {}
        )
        variables |= environment if environment is not None else {}
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command(folder, self.port, delta=delta, options=options),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all of its processes can be ended, and only they
            )
        try:
            self._await_health(time.monotonic() + start_s)
        except BaseException:
            self.close()
            raise

    def _await_health(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise AssertionError(f"vllm serve ended with status {self.process.returncode}:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"vllm serve was not ready in time:\n{self.last_words()}")
            try:
                if self.get("/health", timeout_s=5.0)[0] == 200:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.1)

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def get(self, path: str, *, timeout_s: float = 30.0, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and body (decoded if it is JSON) of a GET."""
        return self._ask(urllib.request.Request(self.url + path, headers=dict(headers or {})), timeout_s)

    def post(
        self, path: str, body: object = None, *, timeout_s: float = 60.0, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body of a POST; `body` goes as JSON, None as no body."""
        return self._ask(self._request(path, body, headers), timeout_s)

    def _request(self, path: str, body: object, headers: Mapping[str, str] | None) -> urllib.request.Request:
        data = b"" if body is None else json.dumps(body).encode()
        said = {"Content-Type": "application/json", **(headers or {})}
        return urllib.request.Request(self.url + path, data=data, headers=said, method="POST")

    def _ask(self, request: urllib.request.Request, timeout_s: float) -> tuple[int, Any]:
        try:
            with _opener.open(request, timeout=timeout_s) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read())

    def greedy(self, prompts: Sequence[Sequence[int]] = PROMPTS, *, num_tokens: int = 24) -> list[list[int]]:
        """Tokens that greedy decoding appends to each prompt."""
        wanted = completion([list(prompt) for prompt in prompts], num_tokens)
        status, body = self.post("/v1/completions", wanted, timeout_s=120.0)
        assert status == 200, body
        return [choice["token_ids"] for choice in sorted(body["choices"], key=lambda choice: choice["index"])]

    def stream(self, prompt: Sequence[int] = PROMPTS[0], *, num_tokens: int = 200) -> Iterator[tuple[float, list[int]]]:
        """Greedy decoding as it happens: (time.monotonic() of arrival, new tokens)."""
        wanted = completion(list(prompt), num_tokens) | {"stream": True}
        with _opener.open(self._request("/v1/completions", wanted, None), timeout=120.0) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    body = json.loads(line[6:])
                    assert "error" not in body, body
                    for choice in body["choices"]:
                        if choice.get("token_ids"):
                            yield time.monotonic(), choice["token_ids"]

    def background_stream(self, prompt: Sequence[int] = PROMPTS[0], *, num_tokens: int = 200) -> Streaming:
        """The same in a thread."""
        return Streaming(self, prompt, num_tokens)

    # -- ending -------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End all of its processes without warning, as a lost machine would."""
        self._signal(signal.SIGKILL)
        self.process.wait(_GRACE_S)

    def close(self) -> None:
        """End it and everything it started. Idempotent."""
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Streaming:
    """A streamed completion in a thread.

    Attributes:
        arrivals: (time.monotonic(), tokens) so far.
    """

    def __init__(self, server: Server, prompt: Sequence[int], num_tokens: int) -> None:
        self.arrivals: list[tuple[float, list[int]]] = []
        self._error: BaseException | None = None
        self._wanted = (server, prompt, num_tokens)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._first = threading.Event()
        self._thread.start()

    def _run(self) -> None:
        server, prompt, num_tokens = self._wanted
        try:
            for arrival in server.stream(prompt, num_tokens=num_tokens):
                self.arrivals.append(arrival)
                self._first.set()
        except BaseException as error:
            self._error = error
        finally:
            self._first.set()

    def wait_for_first(self, timeout_s: float = 60.0) -> None:
        """Return when tokens have begun to arrive."""
        assert self._first.wait(timeout_s), "no token arrived"
        assert self.arrivals, self._error

    def tokens(self, timeout_s: float = 120.0) -> list[int]:
        """All tokens, when it has ended well."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"only {self.num_tokens} tokens in {timeout_s} s"
        if self._error is not None:
            raise self._error
        return [token for _, tokens in self.arrivals for token in tokens]

    @property
    def num_tokens(self) -> int:
        """So far."""
        return sum(len(tokens) for _, tokens in list(self.arrivals))

    def num_between(self, start: float, end: float) -> int:
        """Tokens that arrived in an interval of time.monotonic()."""
        return sum(len(tokens) for at, tokens in list(self.arrivals) if start <= at < end)

    def longest_gap_s(self) -> float:
        """Between two arrivals."""
        times = [at for at, _ in list(self.arrivals)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def command(folder: Path, port: int, *, delta: bool = True, options: Mapping[str, object] | None = None) -> list[str]:
    """The command line of a server for a tiny checkpoint."""
    chosen: dict[str, object] = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": MODEL,
        "max-model-len": MAX_MODEL_LEN,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": KV_CACHE_BYTES,
        "enforce-eager": True,
        "disable-log-stats": True,
        "weight-transfer-config": json.dumps({"backend": "torch_delta"}) if delta else None,
    }
    chosen |= options if options is not None else {}
    arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    for name, value in chosen.items():
        if value is not None:
            arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return arguments


def completion(prompt: object, num_tokens: int) -> dict[str, object]:
    """Body of a greedy completion of token prompts, answered with tokens."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
