"""What happens to a publisher that a script never closes."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from torch_delta.publish import at_exit

class Fake:
    def __init__(self, name):
        self.name, self.pool = name, ThreadPoolExecutor(1)
        at_exit.remember(self)

    def close(self):
        self.pool.submit(print, "closed", self.name).result()  # as the real one still has work for its threads
        if self.name == "bad":
            raise OSError("no room")

    def detach(self):
        print("detached", self.name)

first, bad, last = Fake("first"), Fake("bad"), Fake("last")
gone = Fake("gone")
at_exit.forget(gone)
"""


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("", 0, ["closed first", "closed bad", "closed last"]),
        ("raise SystemExit(0)", 0, ["closed first", "closed bad", "closed last"]),
        ("raise ValueError", 1, ["detached first", "detached bad", "detached last"]),
    ],
    ids=["last line", "exit", "error"],
)
def test_it_is_closed_after_the_last_line_and_left_alone_after_an_error(
    ending: str, status: int, said: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + ending], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert done.stdout.splitlines() == said
    assert ("OSError: no room" in done.stderr) == (status == 0)  # logged, since there is nobody to raise to
