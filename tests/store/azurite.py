"""Azurite, the local Azure: where it is, how it gets there, and a way past obstore into its containers.

It is a Node program without a Python package. It goes into the virtual environment that runs the tests, so `make clean`
removes it with everything else. Without npm the Azure tests are skipped, but never where `CI` is set.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import pytest

VERSION = "3.37.0"
ACCOUNT = "tdtests"
KEY = base64.b64encode(b"a key that opens nothing").decode()


def azurite_command() -> list[str]:
    """How to start it; installs it once."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return _cannot("needs node and npm")
    folder = Path(sys.prefix) / f"azurite-{VERSION}"
    script = folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    if not script.exists():
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not script.exists() and (reason := _install(npm, folder)):
                return _cannot(reason)
    return [node, str(script)]


def _install(npm: str, folder: Path) -> str:
    options = ["--omit=dev", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    # Moved into place at the end: an installation that was interrupted must not look like one.
    half = folder / "half"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    command = [npm, "install", f"azurite@{VERSION}", f"--prefix={half}", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        return "npm did not install azurite in time"
    if done.returncode != 0:
        return f"npm could not install azurite: {done.stderr[-500:]}"
    (half / "node_modules").rename(folder / "node_modules")
    return ""


def _cannot(reason: str) -> list[str]:
    if os.environ.get("CI") == "true":
        pytest.fail(f"azurite: {reason}")
    pytest.skip(f"azurite: {reason}")


def signature() -> str:
    """A query that lets raw requests in: an account SAS."""
    fields = {"sv": "2018-11-09", "ss": "b", "srt": "sco", "sp": "rwdlac", "se": "2099-01-01T00:00:00Z"}
    signed = "\n".join([ACCOUNT, fields["sp"], fields["ss"], fields["srt"], "", fields["se"], "", "", fields["sv"], ""])
    mac = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    return urlencode({**fields, "sig": base64.b64encode(mac).decode()})


def azure_environment(port: int) -> dict[str, str]:
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }
