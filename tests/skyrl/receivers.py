"""An inference server as SkyRL's client sees it, around the real working copy instead of vLLM: real HTTP on loopback.

The order of calls is checked as vLLM's workers check it, and every call is recorded.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from tests.skyrl.checkpoints import read_bits
from torch_delta import Follower, LocalCheckpoint
from torch_delta_skyrl.requests import fetch_version

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 60.0


class Receiver:
    """One server; a context manager.

    Args:
        checkpoint: folder of its host's working copy; servers of one host share it. None takes what init names.
        store: followed instead of the stream's URL, for counting and faults.
    """

    def __init__(self, checkpoint: Path | None = None, *, store: Any = None) -> None:
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.loaded: dict[str, Any] | None = None
        self.version: int | None = None
        self.reports: list[Any] = []
        self.fail_fetch: Exception | None = None
        self._folder = checkpoint
        self._store = store
        self._init: dict[str, Any] | None = None
        self._fetched: int | None = None
        self._session = self._paused = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def handle(self, path: str, body: Any) -> None:
        """Answer a request; what is raised becomes status 500 with the message."""
        self.calls.append(path)
        self.bodies.append(body)
        getattr(self, "on_" + path.partition("?")[0].strip("/"))(body)

    def on_init_weight_transfer_engine(self, body: Any) -> None:
        self._init = body["init_info"]

    def on_fetch_weights(self, body: Any) -> None:
        if self.fail_fetch is not None:
            raise self.fail_fetch
        assert self._init is not None, "fetch before init"
        assert not self._paused, "a fetch belongs before the pause"
        stream = self._init["stream"]
        version = fetch_version(body["target_version"], body.get("sync_dir"), body.get("uri"), stream)
        with self._checkpoint() as checkpoint, Follower(self._store or stream) as follower:
            self.reports += list(follower.apply_to(checkpoint, until=version, timeout_s=TIMEOUT_S))
        self._fetched = version

    def on_pause(self, _body: Any) -> None:
        self._paused = True

    def on_reset_prefix_cache(self, _body: Any) -> None:
        assert self._paused

    def on_start_weight_update(self, _body: Any) -> None:
        assert self._paused
        assert not self._session
        self._session = True

    def on_update_weights(self, body: Any) -> None:
        assert self._session
        target = body["update_info"]["target_version"]
        with self._checkpoint() as checkpoint, checkpoint.reading() as folder:
            if checkpoint.version != target:
                raise RuntimeError(f"the checkpoint is at version {checkpoint.version}, not {target}")
            self.loaded = read_bits(folder)
        self.version = target

    def on_finish_weight_update(self, _body: Any) -> None:
        assert self._session
        self._session = False

    def on_resume(self, _body: Any) -> None:
        self._session = self._paused = False

    def _checkpoint(self) -> LocalCheckpoint:
        assert self._init is not None
        folder = self._folder if self._folder is not None else self._init["local_checkpoint_dir"]
        return LocalCheckpoint(folder, base=self._init["base_model_path"], timeout_s=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            status, answer = 200, {"status": "ok"}
            try:
                receiver.handle(self.path, json.loads(text) if text else None)
            except Exception as error:
                status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
            self._answer(status, answer)

        def do_GET(self) -> None:
            assert self.path == "/get_world_size"
            self._answer(200, {"world_size": 1})

        def _answer(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Tests read `calls`."""

    return Handler
