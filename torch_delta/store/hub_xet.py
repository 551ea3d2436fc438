"""Bytes to and from a Hub bucket through hf-xet, watched: a transfer in which nothing moves is cut.

hf-xet knows no deadlines and repeats by itself for minutes, so each transfer runs in a thread of its own, which the
caller watches and abandons when it stalls (F80). An upload makes nothing visible: it stores content under its hash, to
which a batch then gives a name.

hf-xet keeps threads that do not survive a fork. A process that forked uses a store of its own (F79).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch_delta.errors import TorchDeltaError
from torch_delta.store.calls import Answer
from torch_delta.store.hub_replies import HubFile, HubTrouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_delta.store.hub_config import HubConfig
    from torch_delta.store.hub_http import HubClient

_WATCH_S: Final = 0.05  # how often a waiting caller looks whether bytes moved
_NUM_HANDED_OVER: Final = 2  # pieces between the caller's iterable and hf-xet
_MOST_WORDS: Final = 300
_ADVICE = "Check network and HF_ENDPOINT, then repeat"
_ACCESS_ADVICE = "Set HF_TOKEN or log in with `hf auth login`, and check what the token may do"


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes that are stored on the Hub, with or without a name.

    Attributes:
        hash: as in `HubFile.content`.
        size_bytes: their length.
    """

    hash: str
    size_bytes: int


class Transfers:
    """All transfers of one store. Thread-safe.

    Args:
        client: gives tokens.
        config: limits.
        stop: set when the store closes.

    Raises:
        TorchDeltaError: hf-xet is missing or too old.
    """

    def __init__(self, client: HubClient, config: HubConfig, stop: threading.Event) -> None:
        self._client = client
        self._config = config
        self._stop = stop
        self._lock = threading.Lock()
        self._session: Any = None
        self._pid: int | None = None

    def check_process(self) -> None:
        """Refuse to go on in a child of the process that used this store first (F79).

        Raises:
            HubTrouble: this is such a child.
        """
        if self._pid is not None and self._pid != os.getpid():
            said = f"this store was used in process {self._pid} before process {os.getpid()} was forked from it"
            advice = "Open the store in the process that uses it, and start processes with spawn instead of fork"
            raise HubTrouble(Answer("refused", said, advice, None))
        self._pid = os.getpid()

    def upload(self, pieces: Iterable[bytes]) -> Content:
        """Store content; nothing is visible afterwards.

        Args:
            pieces: consumed in the caller's thread.

        Raises:
            HubTrouble: it failed or stalled.
            BaseException: what `pieces` raised.
        """
        inbox: queue.Queue[bytes | None] = queue.Queue(_NUM_HANDED_OVER)
        watched = _Watched(self._config.stall_timeout_s, self._stop)

        def send() -> Content:
            import hf_xet

            commit = self._open().new_upload_commit(**self._access("write"))
            watched.began(commit)
            upload = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
            while (piece := inbox.get()) is not None:
                upload.write(piece)
                watched.moved()
            stored = upload.finish().xet_info
            commit.wait_to_finish()
            return Content(stored.hash, stored.file_size)

        watched.start(send)
        try:
            for piece in pieces:
                watched.moved()  # the source may take its time; that is no stall
                watched.hand_over(inbox, piece)
            watched.hand_over(inbox, None)
        except BaseException:
            watched.abandon()
            _release(inbox)
            raise
        content: Content = watched.result()
        return content

    def download(self, file: HubFile, start: int, end: int) -> bytes:
        """Bytes start..end of an object.

        Raises:
            HubTrouble: it failed or stalled, or another number of bytes came.
        """
        watched = _Watched(self._config.stall_timeout_s, self._stop)

        def receive() -> bytes:
            import hf_xet

            group = self._open().new_download_stream_group(**self._access("read"))
            watched.began(group)
            body = bytearray()
            for piece in group.download_stream(hf_xet.XetFileInfo(file.content, file.size_bytes), start=start, end=end):
                body += piece
                watched.moved()
            return bytes(body)

        watched.start(receive)
        body: bytes = watched.result()
        if len(body) != end - start:
            raise HubTrouble(Answer("unclear", f"{len(body)} bytes came, expected {end - start}", _ADVICE, None))
        return body

    def _access(self, kind: str) -> dict[str, Any]:
        """Where hf-xet gets tokens, and with which; the content store itself never sees the Hub's token."""
        headers = self._client.headers()
        return {
            "token_refresh_url": self._client.token_url(kind),
            "token_refresh_headers": headers,
            "custom_headers": {name: value for name, value in headers.items() if name.lower() != "authorization"},
        }

    def _open(self) -> Any:
        """The session, made on first use so that opening a store starts no threads."""
        with self._lock:
            if self._session is None:
                import hf_xet

                self._session = hf_xet.XetSession()
            return self._session


class _Watched:
    """One transfer in a thread of its own. The thread ends with it, or is abandoned: it is a daemon."""

    def __init__(self, stall_timeout_s: float, stop: threading.Event) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._stop = stop
        self._done = threading.Event()
        self._outcome: list[Any] = []
        self._error: Exception | None = None
        self._transfer: Any = None
        self._moved_s = time.monotonic()
        self._last_progress: object = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begin `work` in a thread."""

        def run() -> None:
            try:
                self._outcome.append(work())
            except Exception as error:
                self._error = error
            finally:
                self._done.set()

        threading.Thread(target=run, name="torch_delta-xet", daemon=True).start()

    def began(self, transfer: Any) -> None:
        """What can be asked for progress, if it tells any, and be aborted."""
        self._transfer = transfer

    def moved(self) -> None:
        """Note that bytes moved just now."""
        self._moved_s = time.monotonic()

    def hand_over(self, inbox: queue.Queue[bytes | None], piece: bytes | None) -> None:
        """Give the transfer its next piece, or None for the end, as soon as it can take it."""
        while not self._done.is_set():
            try:
                return inbox.put(piece, timeout=_WATCH_S)
            except queue.Full:
                self._check()
        return None  # it failed; `result` says why

    def result(self) -> Any:
        """Wait for the end.

        Raises:
            HubTrouble: the transfer failed, stalled, or the store was closed.
        """
        try:
            while not self._done.wait(_WATCH_S):
                self._check()
        except BaseException:
            self.abandon()
            raise
        if self._error is not None:
            raise _meaning(self._error) from self._error
        return self._outcome[0]

    def abandon(self) -> None:
        """Tell the transfer to end, and do not wait for it."""

        def abort() -> None:
            with contextlib.suppress(Exception):  # it has not begun, or has ended by itself
                self._transfer.abort()

        threading.Thread(target=abort, name="torch_delta-xet-abort", daemon=True).start()

    def _check(self) -> None:
        if self._stop.is_set():
            raise HubTrouble(Answer("refused", "the store was closed", "Open it again", None))
        with contextlib.suppress(Exception):  # downloads tell no progress, and no transfer does before it begins
            report = self._transfer.progress()
            progress = report.total_bytes_completed, report.total_transfer_bytes_completed
            if progress != self._last_progress:
                self._last_progress = progress
                self.moved()
        still_s = time.monotonic() - self._moved_s
        if still_s > self._stall_timeout_s:
            raise HubTrouble(Answer("unclear", f"no byte moved for {self._stall_timeout_s:g} s", _ADVICE, None))


def check_hf_xet(url: str) -> None:
    """Refuse to open a store that could not transfer anything.

    Raises:
        TorchDeltaError: hf-xet is missing or too old.
    """
    try:
        from hf_xet import XetSession  # noqa: F401
    except ImportError as error:
        raise TorchDeltaError(
            f"{url}: Hub buckets need hf-xet 1.5 or later: pip install 'torch-delta[hub]'", url=url
        ) from error


def _release(inbox: queue.Queue[bytes | None]) -> None:
    """Let a transfer that waits for its next piece see the end."""
    with contextlib.suppress(queue.Empty):
        while True:
            inbox.get_nowait()
    with contextlib.suppress(queue.Full):
        inbox.put_nowait(None)


def _meaning(error: Exception) -> HubTrouble:
    if isinstance(error, HubTrouble):
        return error
    said = " ".join(f"hf-xet: {type(error).__name__}: {error}".split())[:_MOST_WORDS]
    if "Authentication" in type(error).__name__ or isinstance(error, PermissionError) or "403 Forbidden" in said:
        return HubTrouble(Answer("refused", said, _ACCESS_ADVICE, None))
    return HubTrouble(Answer("unclear", said, _ADVICE, None))
