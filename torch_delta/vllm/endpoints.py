"""The HTTP routes a server gets when it is started with VLLM_PLUGINS=torch_delta.

    POST /torch_delta/init      stream, checkpoint, base, mode, timeout_s, auto_follow
    POST /torch_delta/prepare   version (default: the newest), stream_id, timeout_s, wait (default false)
    POST /torch_delta/update    version, stream_id, mode, timeout_s, resume_timeout_s
    POST /torch_delta/verify
    GET  /torch_delta/status
    GET  /torch_delta/ready     ?version=N&stream_id=ID: 200 or 503

All of them want the API key of the server (--api-key or VLLM_API_KEY), if it has one, or TORCH_DELTA_TOKEN. fastapi and
vLLM are imported where they are used: this module is loaded by vLLM alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from torch_delta.vllm.config import AUTO_APPLY
from torch_delta.vllm.endpoints_calls import EngineCalls, why_not
from torch_delta.vllm.endpoints_control import Controller
from torch_delta.vllm.endpoints_follow import AutoApply, wanted
from torch_delta.vllm.endpoints_requests import REQUIRED, Problem, Tokens, fields, is_seconds, is_version, read_json

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Awaitable, Callable, Mapping

logger = logging.getLogger("torch_delta")

TOKEN = "TORCH_DELTA_TOKEN"  # noqa: S105 - the name of a variable

_MODE = ("auto", lambda value: value in ("auto", "reload"), "auto or reload")
_STREAM_ID = (None, lambda value: value is None or (isinstance(value, str) and value != ""), "a stream id, or null")
_PREPARE = {
    "version": (None, lambda value: value is None or is_version(value), "a version, or null for the newest"),
    "timeout_s": (None, lambda value: value is None or is_seconds(value), "seconds above 0"),
    "stream_id": _STREAM_ID,
    "wait": (False, lambda value: isinstance(value, bool), "true or false"),
}
_UPDATE = {
    "version": (REQUIRED, is_version, "a version: 0 or more"),
    "mode": _MODE,
    "stream_id": _STREAM_ID,
    "timeout_s": (120.0, is_seconds, "seconds above 0"),
    "resume_timeout_s": (60.0, is_seconds, "seconds above 0"),
}


class EndpointPlugin:
    """What vLLM's entry point group `vllm.endpoint_plugins` wants. Its methods run once, on the server's event loop."""

    name = "torch_delta"
    required_tasks = None

    def __init__(self) -> None:
        self._controller: Controller | None = None
        self._auto: AutoApply | None = None
        self._task: asyncio.Task[None] | None = None
        self._tokens = Tokens([])

    def attach_router(self, app: Any) -> None:
        """Add the routes.

        Args:
            app: the FastAPI application.
        """
        from starlette.routing import Route

        routes = {
            ("POST", "init"): self._init,
            ("POST", "prepare"): self._prepare,
            ("POST", "update"): self._update,
            ("POST", "verify"): self._verify,
            ("GET", "status"): self._status,
            ("GET", "ready"): self._ready,
        }
        for (method, name), action in routes.items():
            path = f"/torch_delta/{name}"
            app.router.routes.append(Route(path, self._answering(action), methods=[method], include_in_schema=False))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Connect the routes to the engine, and start applying at once if the operator wants that.

        Args:
            engine_client: vLLM's client of its engine; None in a server without one.
            state: of the application; unused.
            args: the command line; its API keys hold for our routes too.

        Raises:
            RequestRefused: the environment asks for what this server cannot do.
        """
        del state
        from torch_delta.errors import RequestRefused

        keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        self._tokens = Tokens([*keys, os.environ.get(TOKEN)])
        if not self._tokens.required:
            logger.warning("whoever reaches this server may update its weights; set --api-key or %s", TOKEN)
        reason = why_not(engine_client)
        self._controller = Controller(EngineCalls(engine_client), reason)
        if wanted(os.environ):
            if reason is not None:
                raise RequestRefused(f"versions cannot be applied at once: {reason}", field=AUTO_APPLY)
            self._auto = AutoApply(self._controller)
            self._task = asyncio.create_task(self._auto.run())

    def _answering(
        self, action: Callable[[Controller, Any], Awaitable[tuple[int, Mapping[str, object]]]]
    ) -> Callable[[Any], Awaitable[Any]]:
        """A route around an action: token before anything else, problems as answers."""
        from starlette.responses import JSONResponse

        async def answer(request: Any) -> Any:
            try:
                self._tokens.check(request.headers.get("authorization"))
                status, body = await action(self._started(), request)
            except Problem as problem:
                return JSONResponse(problem.body(), status_code=problem.status)
            return JSONResponse(dict(body), status_code=status)

        return answer

    def _started(self) -> Controller:
        if self._controller is None:
            raise Problem(503, "the server is starting", phase="start", kind="Unavailable")
        return self._controller

    async def _init(self, controller: Controller, request: Any) -> tuple[int, Mapping[str, object]]:
        await controller.init(await _body(request))  # its fields are the engine's to check
        return 200, {"message": "initialised"}

    async def _prepare(self, controller: Controller, request: Any) -> tuple[int, Mapping[str, object]]:
        asked: Any = fields(await _body(request), _PREPARE)
        version = asked.pop("version")
        return 200, await controller.prepare(version, **asked)

    async def _update(self, controller: Controller, request: Any) -> tuple[int, Mapping[str, object]]:
        asked: Any = fields(await _body(request), _UPDATE)
        version = asked.pop("version")
        return 200, await controller.update(version, **asked)

    async def _verify(self, controller: Controller, request: Any) -> tuple[int, Mapping[str, object]]:
        fields(await _body(request), {})
        return 200, await controller.verify()

    async def _status(self, controller: Controller, request: Any) -> tuple[int, Mapping[str, object]]:
        del request
        status = await controller.status()
        return 200, status | {"auto_apply": self._auto.report() if self._auto is not None else None}

    async def _ready(self, controller: Controller, request: Any) -> tuple[int, Mapping[str, object]]:
        text = request.query_params.get("version", "0")
        wanted_id = request.query_params.get("stream_id")
        unknown = sorted(request.query_params.keys() - {"version", "stream_id"})
        if unknown or not (text.isascii() and text.isdigit() and is_version(int(text[:20]))):
            raise Problem(
                400, f"expected ?version=N&stream_id=ID, got {str(request.query_params)[:200]!r}", phase="read"
            )
        status = await controller.status()
        now = status["version"]
        follows = status["stream_id"]
        ready = status["ready"] is True and isinstance(now, int) and now >= int(text) and wanted_id in {None, follows}
        return (200 if ready else 503), {"ready": ready, "version": now, "stream_id": follows, "wanted": int(text)}


async def _body(request: Any) -> Mapping[str, object]:
    return await read_json(request.stream(), request.headers.get("content-type"))
