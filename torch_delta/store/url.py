"""From a URL to a store; backends are imported when their scheme is first used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from torch_delta.errors import TorchDeltaError

if TYPE_CHECKING:
    from torch_delta.store.base import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEME_WITHOUT_SLASHES = re.compile(r"(?i:file|memory|s3|gs|az|hf):(?!//)")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._/-]+")
_SUPPORTED = (
    "a directory path, file:///absolute/path, memory://name, s3:// gs:// az://bucket/prefix, "
    "hf://buckets/owner/name/prefix"
)


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at `url`. Nothing is read or made before it is used.

    - A path: relative paths refer to the current directory now; ``~`` and ``~user`` at the start are expanded;
      environment variables are not.
    - ``file:///absolute/path``: percent-encoded as in any URL; nothing is expanded. `store.url` has this form.
    - ``memory://name``: within this process.
    - ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
      ``hf://buckets/owner/name/prefix``: see docs/stores.md.

    Args:
        url: one of these. A `pathlib.Path` is a path whatever it looks like, and its ``~`` is expanded as well.

    Returns:
        A store that every thread may use.

    Raises:
        TorchDeltaError: a scheme that this release does not have, or a malformed URL.
    """
    text = os.fspath(url)
    scheme = _SCHEME.match(text) if isinstance(url, str) else None
    if not text or "\0" in text:
        raise _malformed(text, "it is empty or holds a NUL character")
    if scheme is None and isinstance(url, str) and _SCHEME_WITHOUT_SLASHES.match(text):
        raise _malformed(text, "two slashes follow the colon; a relative path that looks like this starts with ./")
    if scheme is None:
        from torch_delta.store.local import LocalStore

        return LocalStore(Path(text).expanduser())
    match scheme.group(1).lower():
        case "file":
            from torch_delta.store.local import LocalStore

            return LocalStore(_file_path(text))
        case "memory":
            from torch_delta.store.memory import MemoryStore

            name = text[scheme.end() :]
            if not _MEMORY_NAME.fullmatch(name):
                raise _malformed(text, "expected memory://name with letters, digits and . _ - /")
            return MemoryStore(name)
        case "s3" | "gs" | "az":
            from torch_delta.store.object import ObjectStore

            return ObjectStore(text)
        case "hf":
            from torch_delta.store.hub import HubStore

            return HubStore(text)
        case other:
            raise TorchDeltaError(f"{text}: unknown scheme {other!r}; supported: {_SUPPORTED}", url=text, scheme=other)


def _file_path(text: str) -> str:
    parts = urlsplit(text)
    if parts.netloc not in {"", "localhost"}:
        raise _malformed(text, f"file:// has three slashes before the path; {parts.netloc!r} would be a host")
    if parts.query or parts.fragment:
        raise _malformed(text, "write ? and # in a path as %3F and %23")
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise _malformed(text, "expected file:///absolute/path")
    return path


def _malformed(text: str, why: str) -> TorchDeltaError:
    return TorchDeltaError(f"not a store URL: {text!r}: {why}. Supported: {_SUPPORTED}", url=text)
