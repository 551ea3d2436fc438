"""Signs of life: how a trainer that is started by mistake learns that the stream has a writer already (rule H2).

The live one   writes head.json again every third of `alive_s`, with a number that grows, and says goodbye at its end.
A second one   waits until that has been silent long enough by the store's clock, or by its own while it looks on, and
               stops with an error that names the other as soon as anything moves.

A trainer that starts again after a crash waits for at most `alive_s`, and not at all if the one before it said goodbye
or ran on this machine. Nothing rests on the signs: a commit and a successor are created once, whoever believes to live.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_delta.errors import Fenced, FormatError, ObjectNotFound, TorchDeltaError
from torch_delta.format.head import Head, Sign
from torch_delta.format.keys import HEAD_KEY, new_nonce
from torch_delta.format.limits import MAX_HINT_BYTES
from torch_delta.store.waiting import Backoff
from torch_delta.stream.claim import store_now_s
from torch_delta.stream.identity import read_json

if TYPE_CHECKING:
    from torch_delta.stream.stream import Stream

_logger = logging.getLogger("torch_delta")
_SIGNS_PER_LIFE = 3
_STOP_S = 5.0


class Pulse:
    """The hint of a live writer, kept fresh by a thread of its own; rank 0's.

    Args:
        stream: that is written to.
        version: where it stands.
        sha256: of that version's commit, or of stream.json.
        alive_s: whole seconds; 0 gives no signs, and then the hint is written after commits only.
    """

    def __init__(self, stream: Stream, version: int, sha256: str, alive_s: int) -> None:
        self._stream = stream
        self._place = version, sha256
        self._seconds = alive_s
        self._beat = 0
        self._writer = new_nonce()
        self._info = {"host": platform.node()[:255], "pid": str(os.getpid()), "machine": _machine()}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._is_fenced = False
        self._thread: threading.Thread | None = None
        if alive_s:
            self._thread = threading.Thread(target=self._run, name="torch_delta-pulse", daemon=True)
            self._thread.start()

    def tell(self, version: int, sha256: str) -> None:
        """Leave the hint at a version that was just committed.

        Raises:
            StoreError: it was not written.
        """
        with self._lock:
            self._place = version, sha256
            self._write()

    def stop(self, *, is_fenced: bool) -> None:
        """Say goodbye, unless the stream is another writer's now; never raises."""
        self._is_fenced = is_fenced
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        """The first sign at once; what cannot be written is tried again with the next."""
        while True:
            is_last = self._stopping.is_set()
            try:
                with self._lock:
                    if not is_last or (not self._is_fenced and self._is_ours()):
                        self._write()
            except TorchDeltaError as error:
                _logger.warning("no sign of life in %s: %s", self._stream.store.url, error)
            except Exception:
                _logger.exception("no sign of life in %s", self._stream.store.url)
            if is_last:
                return
            self._stopping.wait(self._seconds / _SIGNS_PER_LIFE)

    def _write(self) -> None:
        sign = None
        if self._seconds:
            self._beat += 1
            seconds = 0 if self._stopping.is_set() else self._seconds
            sign = Sign(writer=self._writer, seconds=seconds, beat=self._beat, info=self._info)
        self._stream.write_head(*self._place, sign)

    def _is_ours(self) -> bool:
        head = _look(self._stream)
        return head is not None and head.sign is not None and head.sign.writer == self._writer


def refuse_if_alive(stream: Stream) -> None:
    """Stop a writer that attaches to a stream which another one writes to; may wait as long as that one's `alive_s`.

    Raises:
        Fenced: it lives; names it and says how to go on.
        StoreUnavailable: no clear answer.
    """
    head = _look(stream)
    if head is None or head.sign is None or _is_over(head.sign):
        return
    seen = head.sign
    age_s = _age_s(stream, head.stream_id)
    left_s = seen.seconds - age_s
    if left_s > 0:
        _logger.warning(
            "%s: a writer (%s) gave a sign of life %.0f s ago; waiting up to %.0f s to see whether it lives",
            stream.store.url,
            seen.owner,
            age_s,
            left_s,
        )
    deadline_s = time.monotonic() + left_s
    never = threading.Event()
    for wait_s in Backoff().waits_s():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        never.wait(min(wait_s, left_s))
        head = _look(stream)
        if head is None or head.sign is None or _is_over(head.sign):
            return
        if head.sign != seen:
            raise Fenced(
                f"{stream.store.url} has a writer that lives ({head.sign.owner}), at version {head.version}. Two "
                "trainers cannot write one stream: publish to another URL, or stop that one first. To take the stream "
                "over, which fences it, attach with PublishConfig(on_restart='takeover')",
                version=head.version,
                owner=head.sign.owner,
                key=HEAD_KEY,
            )


def _look(stream: Stream) -> Head | None:
    try:
        head = Head.from_bytes(read_json(stream.store, HEAD_KEY, MAX_HINT_BYTES))
    except (ObjectNotFound, FormatError):
        return None
    return head if head.stream_id == stream.load()[0].stream_id else None


def _age_s(stream: Stream, stream_id: str) -> float:
    """Of the hint, by the store's clock; 0 where it keeps no times."""
    try:
        written_s = stream.store.stat(HEAD_KEY).modified_s
    except ObjectNotFound:
        return 0.0
    now_s = store_now_s(stream.store, stream_id) if written_s is not None else None
    return 0.0 if now_s is None or written_s is None else max(now_s - written_s, 0.0)


def _is_over(sign: Sign) -> bool:
    """Whether a writer said goodbye, or was a process of this machine that is there no more."""
    if sign.seconds == 0:
        return True
    machine, pid = _machine(), sign.info.get("pid", "")
    is_here = bool(machine) and sign.info.get("machine") == machine and pid.isdecimal()
    return is_here and not Path(f"/proc/{pid}").exists()


def _machine() -> str:
    """Names this boot of this machine and the process numbers in use here; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
