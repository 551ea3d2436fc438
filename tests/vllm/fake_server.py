"""A server with the control routes of vLLM or of our plugin and no model: a state machine, scripted faults, and a log.

It refuses what vLLM would refuse (an update outside a session, a second session), so that a client that gets the order
wrong is caught here. Shares no code with the client.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Fault:
    """What happens instead of a request, once unless `times` says otherwise."""

    kind: str  # see `_misbehave`
    times: int = 1
    after: bool = False  # the request takes effect, and only its answer is lost
    status: int = 500
    fired: int = 0


@dataclass
class FakeServer:
    """State of one server; `restart()` makes it a new process."""

    routes: str = "dev"  # or "plugin"
    token: str | None = None
    num_workers: int = 1
    version: int = 0
    refuse_resets: int = 0  # how many resets of the prefix cache it refuses
    overtaking: int = 0  # a version it goes to by itself when an update is asked for
    prepare_error: str | None = None  # every prepare ends with this
    stream_id: str = "a" * 32  # that it follows
    successor: str | None = None  # the stream that continues it, once the server looks; numbers start at 0 there
    url: str = ""
    generation: int = 1
    initialised: bool = False
    state: str = "serving"
    init_infos: list[dict] = field(default_factory=list)
    prepared: int = 0
    preparing: int | None = None
    asked: int = 0  # requests to prepare
    answered: int = 0  # the newest of them that was dealt with
    error: dict | None = None
    leftover: dict | None = None  # an older error that the next look at a request to prepare still shows
    paused: bool = False
    session: bool = False
    stale: bool = False  # weights changed after the last reset
    label: str = "default"
    log: list[str] = field(default_factory=list)
    queries: list[tuple[str, dict]] = field(default_factory=list)
    bodies: list[tuple[str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # requests that break a rule; must stay empty
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.may_prepare = threading.Event()  # cleared: prepares do not end
        self.may_prepare.set()
        self.wanted_id: str | None = None
        self.seen = threading.Condition()
        self._release = threading.Event()
        self._lock = threading.RLock()
        self._server: ThreadingHTTPServer | None = None
        self.start()

    # -- life

    def start(self, port: int = 0) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake._serve(self)

            do_POST = do_GET

            def log_message(self, *args: object) -> None: ...

        class Listener(ThreadingHTTPServer):
            daemon_threads = False  # so that closing waits for the handlers

            def handle_error(self, *args: object) -> None:
                fake.problems.append(repr(sys.exception()))

        server = self._server = Listener(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self._thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> int:
        """Dead: connections are refused. Returns its port, for a restart."""
        server, self._server = self._server, None
        if server is None:
            return urlsplit(self.url).port
        self._release.set()
        server.shutdown()
        server.server_close()
        self._thread.join()
        return server.server_address[1]

    def restart(self) -> None:
        """New processes at the same address: base weights, nothing remembered."""
        port = self.stop()
        self._release = threading.Event()
        self.generation += 1
        self.initialised, self.version, self.prepared, self.error = False, 0, 0, None
        self.preparing, self.asked, self.answered = None, 0, 0
        self.paused = self.session = self.stale = False
        self.start(port)

    def fail(self, route: str, kind: str, **options: object) -> Fault:
        fault = Fault(kind, **options)
        self.faults[route].append(fault)
        return fault

    def wait_for(self, event: str, timeout_s: float = 20.0) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: event in self.log, timeout_s), f"no {event} in {self.log}"

    # -- HTTP

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = dict(parse_qsl(parts.query))
        raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        if self.token is not None and handler.headers.get("Authorization") != f"Bearer {self.token}":
            self._reply(handler, 401, {"error": "Unauthorized"})
            return
        route = parts.path
        if route == "/collective_rpc":
            assert body.keys() <= {"method", "args"}, f"no timeout, ever: {body}"
            route = f"rpc:{body['method']}"
        with self.seen:
            self.log.append(route)
            self.queries.append((route, query))
            self.bodies.append((route, body))
            self.seen.notify_all()
        fault = next((f for f in self.faults[route] if f.fired < f.times), None)
        if fault is not None:
            fault.fired += 1
            if not fault.after:
                self._misbehave(handler, fault)
                return
        status, answer = self._answer(route, query, body)
        if fault is not None:
            self._misbehave(handler, fault)
            return
        self._reply(handler, status, answer)

    def _misbehave(self, handler: BaseHTTPRequestHandler, fault: Fault) -> None:
        if fault.kind == "error":
            self._reply(handler, fault.status, {"error": {"message": "scripted failure", "code": fault.status}})
        elif fault.kind == "garbage":
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(b"<html>not a control route</html>")
        elif fault.kind == "short":  # dies in the middle of its answer
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"{")
        elif fault.kind == "drip":  # one byte now and then: no single read ever times out
            handler.send_response(200)
            handler.send_header("Content-Length", "1000000")
            handler.end_headers()
            try:
                while not self._release.wait(0.05):
                    handler.wfile.write(b" ")
            except OSError:
                pass
        elif fault.kind == "hang":
            self._release.wait(60)
        else:
            assert fault.kind == "drop", fault

    def _reply(self, handler: BaseHTTPRequestHandler, status: int, answer: object) -> None:
        data = json.dumps(answer).encode()
        try:
            handler.send_response(status)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            pass

    # -- what the routes do

    def _answer(self, route: str, query: dict, body: object) -> tuple[int, object]:
        own = route.startswith("/torch_delta/")
        if self.routes != ("plugin" if own else "dev") or (not own and route not in self._dev()):
            return 404, {"detail": "Not Found"}
        with self._lock:
            return self._plugin(route.rpartition("/")[2], body) if own else self._dev()[route](query, body)

    def _dev(self) -> dict[str, Callable]:
        return {
            "/init_weight_transfer_engine": lambda _, body: self._init(body["init_info"]),
            "rpc:torch_delta_status": lambda *_: (200, {"results": self.workers()}),
            "rpc:torch_delta_prepare": lambda _, body: (200, {"results": self._prepare(body["args"][0])}),
            "rpc:torch_delta_verify": lambda *_: (200, {"results": [{"accepted": True}] * self.num_workers}),
            "/pause": self._pause,
            "/resume": self._resume,
            "/start_weight_update": self._start,
            "/update_weights": lambda _, body: self._update(body["update_info"]),
            "/finish_weight_update": self._finish,
            "/reset_prefix_cache": self._reset,
        }

    def _plugin(self, name: str, body: dict) -> tuple[int, object]:
        if name == "init":
            return self._init(body)
        if name == "status":
            return 200, {
                "generation": f"api{self.generation}",
                "workers": self.workers(),
                "owes_reset": self.stale,
                "paused": self.paused,
            }
        if name == "prepare":
            assert body["wait"] is False
            return 200, {"workers": self._prepare(body)}
        if name == "verify":
            return 200, {"workers": [{"accepted": True}] * self.num_workers}
        assert name == "update", name
        self.version = max(self.version, self.overtaking) if self.version is not None else None
        if body.get("stream_id", self.stream_id) != self.stream_id:
            return 409, {"error": {"message": f"this server follows stream {self.stream_id}"}}
        if self.version is not None and body["version"] < self.version:
            return 409, {"error": {"message": "older than the version this server runs"}}
        if self.prepared < body["version"]:
            return 409, {"error": {"message": f"prepare version {body['version']} first"}}
        self.version = body["version"]
        return 200, {"version": self.version, "pause_s": 0.25, "phases_s": {"pause": 0.125, "update": 0.125}}

    def _init(self, init_info: dict) -> tuple[int, object]:
        self.init_infos.append(init_info)
        self.initialised = True
        return 200, {}

    def workers(self) -> list[dict]:
        if self.preparing is not None and self.leftover is not None:
            shown, self.leftover = self.leftover, None
            target, self.preparing, self.error = self.preparing, None, shown
            said = self.workers()  # as between two jobs: the request is queued, and nothing runs
            self.preparing, self.error = target, None
            return said
        if self.preparing is not None and self.may_prepare.is_set():
            self.answered = self.asked
            if self.prepare_error is None:
                if self.wanted_id in {None, self.successor} and self.successor is not None:
                    # The version it runs is none of the new stream: a reload, and not ready until then.
                    self.stream_id, self.successor = self.successor, None
                    self.version, self.prepared = None, 0
                if self.wanted_id not in {None, self.stream_id}:
                    message = f"nothing continues {self.stream_id} as {self.wanted_id}"
                    self.error = {"phase": "prepare", "type": "ChainError", "message": message}
                self.prepared = max(self.prepared, self.preparing)
            else:
                self.error = {"phase": "prepare", "type": "StoreUnavailable", "message": self.prepare_error}
            self.preparing = None
        return [
            {
                "rank": rank,
                "generation": f"g{self.generation}r{rank}",
                "initialised": self.initialised,
                "stream": self.init_infos[-1].get("stream") if self.initialised else None,
                "stream_id": self.stream_id if self.initialised else None,
                "answered": self.answered,
                "state": self.state,
                "version": self.version,
                "prepared": max(self.prepared, self.version or 0),
                "preparing": None if self.preparing is None else {"target": self.preparing, "phase": "fetch"},
                "error": self.error,
                "dirty": None,
                "session": self.session,
                "ready": self.initialised and not self.session and self.version is not None,
                "a field of tomorrow": 1,
            }
            for rank in reversed(range(self.num_workers))
        ]

    def _prepare(self, wanted: dict) -> list[dict]:
        if not self.initialised:
            return [
                {"accepted": False, "error": {"type": "TorchDeltaError", "message": "init first"}}
            ] * self.num_workers
        self.preparing, self.error, self.wanted_id = wanted["version"], None, wanted.get("stream_id")
        self.asked += 1
        return [{"accepted": True, "target": wanted["version"], "request": self.asked}] * self.num_workers

    def _pause(self, query: dict, _: object) -> tuple[int, object]:
        assert query == {"mode": "keep", "clear_cache": "true"}, "an implicit default would abort requests (F111)"
        self.paused = True
        return 200, {"status": "paused"}

    def _resume(self, *_: object) -> tuple[int, object]:
        self.paused = False
        return 200, {"status": "resumed"}

    def _start(self, *_: object) -> tuple[int, object]:
        assert self.paused, "weights change only inside a pause (F108)"
        if self.session:
            return 500, {"error": {"message": "an update is already active"}}
        self.session = True
        return 200, {}

    def _update(self, info: dict) -> tuple[int, object]:
        assert self.session
        assert self.paused
        if info.get("stream_id", self.stream_id) != self.stream_id:
            self.session = False
            return 500, {"error": {"message": f"this engine follows stream {self.stream_id}"}}
        if info["version"] > max(self.prepared, self.version or 0):
            self.session = False
            return 500, {"error": {"message": f"prepare version {info['version']} first"}}
        self.version, self.stale = info["version"], True
        return 200, {}

    def _finish(self, _: object, body: dict) -> tuple[int, object]:
        if not self.session:
            return 500, {"error": {"message": "finish without a matching start"}}
        self.session = False
        self.label = body.get("weight_version", self.label)
        return 200, {}

    def _reset(self, query: dict, _: object) -> tuple[int, object]:
        assert query["reset_running_requests"] == "true"
        if self.refuse_resets > 0:
            self.refuse_resets -= 1
            return 200, {"success": False}
        self.stale = False
        return 200, {"success": True}
