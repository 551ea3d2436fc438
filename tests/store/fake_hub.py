"""A Hub with buckets on the loopback, in a thread of the test: the real client and hf-xet talk to it.

with FakeHub() as hub:
    hub.buckets["tester/run"] = {}
    fault = hub.add(HubFault("POST .*/batch", status=503, num_times=2))
    ...
    assert fault.num_fired == 2

It proves the client's path, not how the real Hub behaves when several writers meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from tests.store.fake_cas import Cas

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = "/api/buckets/{owner}/{name}"
NO_FILE = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"}
NO_BUCKET = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Bucket not found"}


@dataclass
class HubFault:
    """One scripted fault: an answer instead of the work, or "then" the work done and its reply lost."""

    match: str  # regular expression for "METHOD path?query"
    status: int = 503
    num_times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    is_after: bool = False  # do the work first
    hangs: bool = False  # never answer
    num_fired: int = 0


@dataclass
class EntryFault:
    """A batch is answered with 200, but this entry was not done (F76)."""

    path: str  # regular expression
    num_times: int = 1
    num_fired: int = 0


class FakeHub:
    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, dict[str, Any]]] = {}
        self.cas = Cas()
        self.requests: list[str] = []
        self.faults: list[HubFault] = []
        self.entry_faults: list[EntryFault] = []
        self.before_add: Callable[[str], None] = lambda path: None  # another writer, in the middle of a batch
        self.after_batch: Callable[[], None] = lambda: None
        self.page_size = 1000
        self.hidden: dict[str, int] = {}  # path -> looks for which a fresh object stays invisible
        self.tokens: set[str | None] = set()  # that the Hub was shown
        self.content_tokens: set[str | None] = set()  # that the content store was shown
        self.port = 0

    def add(self, fault: HubFault) -> HubFault:
        self.faults.append(fault)
        return fault

    def reset(self) -> None:
        self.requests, self.faults, self.entry_faults, self.hidden, self.page_size = [], [], [], {}, 1000
        self.before_add, self.after_batch = lambda path: None, lambda: None

    def raw_put(self, bucket: str, path: str, data: bytes) -> None:
        content = self.cas.add_plain(data)
        self.buckets[bucket][path] = entry(path, len(data), content)

    def raw_get(self, bucket: str, path: str) -> bytes | None:
        found = self.buckets[bucket].get(path)
        return None if found is None else self.cas.read(found["xetHash"])

    # Running

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._scripted], client_max_size=1 << 30)
        for method, path, handler in (
            ("GET", BUCKET, self._info),
            ("GET", BUCKET + "/xet-{kind}-token", self._token),
            ("POST", BUCKET + "/batch", self._batch),
            ("POST", BUCKET + "/paths-info", self._paths_info),
            ("GET", BUCKET + "/tree", self._tree),
            ("GET", BUCKET + "/tree/{folder:.+}", self._tree),
            ("GET", "/buckets/{owner}/{name}/resolve/{path:.+}", self._resolve),
            ("POST", "/v1/xorbs/{space}/{name}", self._post_xorb),
            ("POST", "/v1/shards", self._post_shard),
            ("GET", "/v1/reconstructions/{name}", self._reconstruction),
            ("GET", "/xorb-data/{name}", self._xorb_data),
        ):
            app.router.add_route(method, path, handler)
        app.router.add_route("*", "/{rest:.*}", self._unknown)  # newer protocols, deduplication, telemetry
        return app

    @web.middleware
    async def _scripted(self, request: web.Request, handler):
        line = f"{request.method} {request.path_qs}"
        self.requests.append(line)
        if request.path.startswith("/api/"):
            self.tokens.add(request.headers.get("Authorization"))
        elif request.path.startswith(("/v1/", "/v2/", "/xorb-data/")):
            self.content_tokens.add(request.headers.get("Authorization"))
        for fault in self.faults:
            if fault.num_fired < fault.num_times and re.search(fault.match, line):
                fault.num_fired += 1
                if fault.hangs:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), 60)
                if fault.is_after:
                    await handler(request)
                breaks = fault.is_after or fault.hangs or fault.status == 0
                if breaks and request.transport is not None:  # or the client has given up before
                    request.transport.abort()
                return web.Response(status=fault.status or 500, text="scripted", headers=fault.headers)
        return await handler(request)

    # Hub

    def _bucket(self, request: web.Request) -> dict[str, dict[str, Any]]:
        found = self.buckets.get(f"{request.match_info['owner']}/{request.match_info['name']}")
        if found is None:
            raise web.HTTPNotFound(headers=NO_BUCKET)
        return found

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"id": "x", "totalFiles": len(self._bucket(request))})

    async def _token(self, request: web.Request) -> web.Response:
        self._bucket(request)
        base, expires_s = f"http://{request.host}", int(time.time()) + 3600
        return web.json_response({"casUrl": base, "exp": expires_s, "accessToken": "content-token"})

    async def _batch(self, request: web.Request) -> web.Response:
        bucket, failed = self._bucket(request), []
        operations = [json.loads(line) for line in (await request.text()).splitlines() if line]
        for operation in operations:
            path, reason = operation["path"], None
            fault = next((f for f in self.entry_faults if f.num_fired < f.num_times and re.search(f.path, path)), None)
            if fault is not None:
                fault.num_fired += 1
                reason = "internal error"
            elif operation["type"] == "deleteFile":
                reason = None if bucket.pop(path, None) is not None else "not found"
            elif (size_bytes := self.cas.size(operation["xetHash"])) is None:
                reason = "unknown content"
            else:
                self.before_add(path)
                bucket[path] = entry(path, size_bytes, operation["xetHash"])
            if reason is not None:
                failed.append({"path": path, "error": reason})
        self.after_batch()
        status = 422 if failed and len(failed) == len(operations) else 200
        return web.json_response({"success": not failed, "failed": failed}, status=status)

    def _is_hidden(self, path: str) -> bool:
        self.hidden[path] = self.hidden.get(path, 0) - 1
        return self.hidden[path] >= 0

    async def _paths_info(self, request: web.Request) -> web.Response:
        bucket, paths = self._bucket(request), (await request.json())["paths"]
        return web.json_response([bucket[path] for path in paths if path in bucket and not self._is_hidden(path)])

    async def _tree(self, request: web.Request) -> web.Response:
        bucket, folder = self._bucket(request), request.match_info.get("folder", "")
        after, size = request.query.get("cursor", ""), min(int(request.query["limit"]), self.page_size)
        assert request.query["recursive"] == "true"
        # As object stores do: by the beginning of the name, which a client must not take for a folder.
        paths = [path for path in sorted(bucket) if path.startswith(folder) and path > after]
        headers = {}
        if len(paths) > size:
            query = f"recursive=true&limit={size}&cursor={paths[size - 1]}"
            headers["Link"] = f'<http://{request.host}{request.path}?{query}>; rel="next"'
        return web.json_response([bucket[path] for path in paths[:size]], headers=headers)

    async def _resolve(self, request: web.Request) -> web.Response:
        found = self._bucket(request).get(request.match_info["path"])
        if found is None:
            raise web.HTTPNotFound(headers=NO_FILE)
        data, asked = self.cas.read(found["xetHash"]), request.headers.get("Range", "")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        if wanted is None:
            return web.Response(body=data)
        begin, end = int(wanted[1]), int(wanted[2]) + 1
        if begin >= len(data):
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(data)}"})
        body = data[begin:end]
        headers = {"Content-Range": f"bytes {begin}-{begin + len(body) - 1}/{len(data)}"}
        return web.Response(status=206, body=body, headers=headers)

    # Content

    async def _post_xorb(self, request: web.Request) -> web.Response:
        self.cas.add_xorb(request.match_info["name"], await request.read())
        return web.json_response({"was_inserted": True})

    async def _post_shard(self, request: web.Request) -> web.Response:
        self.cas.add_shard(await request.read())
        return web.json_response({"result": 1})

    async def _reconstruction(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.cas.size(name) is None:
            raise web.HTTPNotFound
        found = self.cas.reconstruction(name, request.headers.get("Range", ""), f"http://{request.host}")
        return web.json_response(found) if found is not None else web.Response(status=416)

    async def _xorb_data(self, request: web.Request) -> web.Response:
        data = self.cas.xorbs[request.match_info["name"]].data
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"])
        return web.Response(status=206, body=data[int(found[1]) : int(found[2]) + 1])

    async def _unknown(self, request: web.Request) -> web.Response:
        await request.read()
        raise web.HTTPNotFound


def entry(path: str, size_bytes: int, content: str) -> dict[str, Any]:
    now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    return {"type": "file", "path": path, "size": size_bytes, "xetHash": content, "uploadedAt": now}
