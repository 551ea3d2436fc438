"""The demo's two sides as child processes: what they print, and an end to everything if one dies or hangs."""

from __future__ import annotations

import collections
import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LINES_KEPT = 30
_GRACE_S = 40.0  # torchrun's own is 30


class DemoFailed(Exception):
    """A side died, or nothing happened for too long; the message ends with that side's last words."""


class Sides:
    """Runs named Python processes until all have ended well; as a context manager it leaves none behind.

    Args:
        commands: arguments of `python`, by name of the side.
        silence_s: how long both sides together may go without a word before the demo is given up.
    """

    def __init__(self, commands: dict[str, Sequence[str]], silence_s: float) -> None:
        self._silence_s = silence_s
        self._events: queue.SimpleQueue[tuple[str, dict[str, object] | None]] = queue.SimpleQueue()
        self._last_words: dict[str, collections.deque[str]] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if sys.platform == "linux":
            environment.setdefault(
                "GLOO_SOCKET_IFNAME", "lo"
            )  # both ranks are here, whatever the host name resolves to
        for name, arguments in commands.items():
            self._last_words[name] = collections.deque(maxlen=_LINES_KEPT)
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
            self._processes[name] = process
            self._readers.append(threading.Thread(target=self._read, args=(name, process), daemon=True))
            self._readers[-1].start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith("{"):
                    self._events.put((name, json.loads(line)))
                else:
                    self._last_words[name].append(line.rstrip())
        process.wait()
        self._events.put((name, None))

    def events(self) -> Iterator[tuple[str, dict[str, object]]]:
        """What the sides report, as it comes, until all have ended.

        Raises:
            DemoFailed: one ended with an error, or nobody said anything for `silence_s` seconds.
        """
        running = set(self._processes)
        deadline = time.monotonic() + self._silence_s
        while running:
            try:
                name, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                words = "\n".join(self._words_of(name) for name in sorted(running))
                raise DemoFailed(f"nothing happened for {self._silence_s:g} s; still running:\n{words}") from None
            deadline = time.monotonic() + self._silence_s
            if event is not None:
                yield name, event
                continue
            running.discard(name)
            status = self._processes[name].returncode
            if status != 0:
                raise DemoFailed(f"the {name} ended with status {status}:\n{self._words_of(name)}")

    def _words_of(self, name: str) -> str:
        return "\n".join(f"  {name} | {line}" for line in self._last_words[name]) or f"  {name} | (said nothing)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()  # torchrun passes it on to its ranks, and kills those that do not obey
        for process in self._processes.values():
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for reader in self._readers:
            reader.join(_GRACE_S)
