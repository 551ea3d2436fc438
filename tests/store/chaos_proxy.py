"""A TCP proxy on the loopback that breaks HTTP connections by script, and counts what it broke.

with ChaosProxy(("127.0.0.1", 8333)) as proxy:
    fault = proxy.add(Fault("swallow", match=b"PUT /bucket/key", num_times=1))
    ...
    assert fault.num_fired == 1
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")


@dataclass
class Fault:
    """One scripted fault.

    kind: "reset" at accept; "cut up" or "cut down" after some bytes of a request or reply; "swallow" forwards the
        request and drops the reply; "answer" replies by itself; "hang" never replies; "trickle" lets a reply through
        byte by byte from some point on, so slowly that it never ends in time; "throttle" slows it down to some MB/s.
    """

    kind: str
    match: bytes = b""  # in the first bytes of the request
    num_times: int = 1
    after_bytes: int = 0
    answer: bytes = b""
    num_fired: int = 0


def http_error(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)


class ChaosProxy:
    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.requests: list[bytes] = []  # first lines
        self.port = 0

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections: dict[asyncio.Task, asyncio.StreamWriter] = {}

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(reader, writer))
            connections[task] = writer
            task.add_done_callback(connections.pop)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        # Never cancelled: a task cancelled before its first step, or between a connection made and its writer handed
        # over, leaves a socket to the garbage collector. Aborted, each ends by itself and closes what it opened.
        while connections:
            for writer in connections.values():
                writer.transport.abort()
            await asyncio.wait([*connections], timeout=0.1)

    def _take(self, kinds: tuple[str, ...], head: bytes) -> Fault | None:
        for fault in self.faults:
            if fault.kind in kinds and fault.num_fired < fault.num_times and fault.match in head:
                fault.num_fired += 1
                return fault
        return None

    async def _serve(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        server_out = None
        try:
            if self._take(("reset",), b""):
                return _reset(client_out)
            server_in, server_out = await asyncio.open_connection(*self.upstream)
            exchange = _Exchange(self, client_in, client_out, server_in, server_out)
            pumps = [asyncio.ensure_future(exchange.up()), asyncio.ensure_future(exchange.down())]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass
        finally:
            writers = [writer for writer in (client_out, server_out) if writer is not None]
            for writer in writers:
                writer.close()
            for writer in writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


class _Exchange:
    """One connection; the fault of its current request."""

    def __init__(self, proxy, client_in, client_out, server_in, server_out) -> None:
        self.proxy = proxy
        self.client_in, self.client_out, self.server_in, self.server_out = client_in, client_out, server_in, server_out
        self.fault: Fault | None = None
        self.num_up = self.num_down = 0

    async def up(self) -> None:
        while data := await self.client_in.read(65536):
            if data.startswith(METHODS):  # connections are kept: a new request
                self.proxy.requests.append(data.partition(b"\r\n")[0])
                self.fault = self.proxy._take(
                    ("cut up", "cut down", "swallow", "answer", "hang", "trickle", "throttle"), data[:4096]
                )
                self.num_up = self.num_down = 0
            kind = self.fault.kind if self.fault is not None else ""
            self.num_up += len(data)
            if kind == "cut up" and self.num_up > self.fault.after_bytes:
                return _reset(self.client_out)
            if kind == "hang":
                continue
            if kind == "answer":
                self.client_out.write(self.fault.answer)
                await self.client_out.drain()
                return None
            self.server_out.write(data)
            await self.server_out.drain()
        return None

    async def down(self) -> None:
        while data := await self.server_in.read(65536):
            kind = self.fault.kind if self.fault is not None else ""
            self.num_down += len(data)
            if kind == "swallow" and not data.startswith(b"HTTP/1.1 100"):
                return _reset(self.client_out)
            if kind == "cut down" and self.num_down > self.fault.after_bytes:
                self.client_out.write(data[: len(data) - (self.num_down - self.fault.after_bytes)])
                await self.client_out.drain()
                return None
            if kind in {"trickle", "throttle"} and self.num_down > self.fault.after_bytes:
                await self._slowly(data, 1 if kind == "trickle" else 8192)
                continue
            self.client_out.write(data)
            await self.client_out.drain()
        return None

    async def _slowly(self, data: bytes, step: int) -> None:
        for begin in range(0, len(data), step):
            self.client_out.write(data[begin : begin + step])
            await self.client_out.drain()
            await asyncio.sleep(0.02 if step == 1 else 0.001)  # the fault itself


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
