"""Where a working copy's first files come from: a checkpoint folder or a Hugging Face repository."""

from __future__ import annotations

import os
from pathlib import Path

from torch_delta.errors import StoreUnavailable

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
