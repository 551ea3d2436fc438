"""Where a working copy's first files come from: a checkpoint folder or a Hugging Face repository."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch_delta.errors import StoreUnavailable
from torch_delta.receive.access import share
from torch_delta.receive.folder import SafetensorsFolder, weight_files
from torch_delta.receive.install import Stage
from torch_delta.receive.state import HIDDEN, Layout, unbound_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_delta.receive.session import Session

# Weights in other formats would never be updated, so they are not even downloaded.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]


def resolve_base(base: str | os.PathLike[str]) -> Path:
    """The local folder of a base.

    Args:
        base: a folder, or a Hub id such as ``Qwen/Qwen3-8B``, optionally with ``@revision``. A Hub base that is in the
            local cache already is taken from there when the Hub cannot be reached.

    Raises:
        StoreUnavailable: neither a folder nor an id that could be downloaded.
    """
    path = Path(base)
    if path.is_dir():
        return path
    name, _, revision = os.fspath(base).partition("@")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise StoreUnavailable(f"base {base!r}: no such folder", path=str(base), operation="open base")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_PATTERNS))
    except Exception as error:  # the Hub client raises several families of errors
        raise StoreUnavailable(
            f"base {base!r} is no folder here, and could not be had from the Hub: {error}",
            path=str(base),
            operation="download base",
        ) from error


def fill(session: Session, base: str | os.PathLike[str] | None) -> None:
    """Give an empty checkpoint its first files: a copy of `base`, or what lies at its path already.

    Raises:
        FormatError: not a safetensors checkpoint.
        StoreUnavailable: no such base, no room, or something else lies at the path.
    """
    if session.state is not None:
        return
    root = session.layout.root
    if base is None:
        if weight_files(root):
            SafetensorsFolder.open(root)  # refuses what could not be patched later
            session.adopt()
        return
    foreign = sorted(entry.name for entry in root.iterdir() if entry.name != HIDDEN)
    if foreign:
        raise StoreUnavailable(
            f"{root} is not empty ({', '.join(foreign[:5])}) and no checkpoint of ours; choose an empty folder, or "
            "leave base out to take the weights that lie there",
            path=str(root),
            operation="copy base",
        )
    copy_base(session, base)


def copy_base(session: Session, base: str | os.PathLike[str]) -> None:
    """Put a fresh copy of the base in place of whatever is there; same errors as `fill`."""
    source = resolve_base(base)
    SafetensorsFolder.open(source)  # before gigabytes are copied
    with _still(source, session.timeout_s):
        stage = Stage(session.layout)
        try:
            stage.copy_base(source)
            session.install(stage, unbound_state(shared_extents=stage.shared_extents), None)
        except BaseException:
            # Once the move is recorded it must be finished, by whoever opens the checkpoint next.
            if not session.layout.install.exists():
                stage.discard()
            raise


@contextlib.contextmanager
def _still(base: Path, timeout_s: float) -> Iterator[None]:
    """Hold a base still that is itself a working copy."""
    if not (base / HIDDEN).is_dir():
        yield
        return
    lock = share(Layout(base), timeout_s)
    try:
        yield
    finally:
        lock.release()
