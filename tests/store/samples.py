"""What the tests of the directory store share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "commits/00000000000000000001.json"


def temporaries(root: Path) -> list[Path]:
    return sorted(root.rglob(".tmp-*"))


def failing(monkeypatch, name: str, code: int, *, nth: int = 1, after: bool = False) -> list[int]:
    """Let os.<name> fail with `code` at its nth call, having done its work first if `after`; returns the calls."""
    real, calls = getattr(os, name), []

    def fake(*args, **kwargs):
        calls.append(len(calls) + 1)
        if len(calls) == nth:
            if after:
                real(*args, **kwargs)
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fake)
    return calls
