"""Publishers that a script never closed are closed when it ends, so that one line really is enough.

A publisher's threads do not hold up the end of the process, and the last versions may still be in flight then. So
every open publisher is held here, and closed after the last line of the script. A script that ends with an error gets
`detach` instead: the other ranks may be gone, and nobody should wait for them.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import Protocol

_logger = logging.getLogger("torch_delta")


class Closeable(Protocol):
    """What a Publisher is to this module."""

    def close(self) -> None:
        """Wait for what is in flight."""

    def detach(self) -> None:
        """Stop at once; never raises."""


_open: dict[int, Closeable] = {}
_installed = False


def remember(publisher: Closeable) -> None:
    """Close it when the process ends, unless `forget` is called before."""
    global _installed  # noqa: PLW0603 - hooks for the end of the process cannot be installed twice
    _open[id(publisher)] = publisher
    if not _installed:
        _installed = True
        # The private hook runs while thread pools still take work, which they no longer do when atexit's run.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(close_all)


def forget(publisher: Closeable) -> None:
    """It was closed or detached; nothing of it is kept here any more."""
    _open.pop(id(publisher), None)


def close_all() -> None:
    """Close what is still open, oldest first; failures are logged, since there is nobody left to raise to."""
    has_failed = hasattr(sys, "last_value")  # set when an error ended the main script
    for publisher in list(_open.values()):
        if has_failed:
            publisher.detach()
            continue
        try:
            publisher.close()
        except Exception:
            _logger.exception("the last versions of a publisher that was left open were not published")
    _open.clear()
