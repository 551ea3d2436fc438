"""Small checks that backends share: listing prefixes, names of what is not exclusive, the errors of bounded reads."""

from __future__ import annotations

import re
from typing import Final

from torch_delta.errors import FormatError
from torch_delta.format.keys import validate_key

_NONCE: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")


def is_key(name: str) -> bool:
    """Whether a stored name obeys the key grammar; what does not is no object of ours and is not listed."""
    try:
        validate_key(name)
    except FormatError:
        return False
    return True


def check_prefix(prefix: str) -> None:
    """Accept ``""`` or a folder with its closing slash.

    Raises:
        ValueError: anything else; a prefix inside a name would mean different things on different backends.
        FormatError: the folder breaks the key grammar.
    """
    if prefix == "":
        return
    if not prefix.endswith("/"):
        raise ValueError(f"a listing prefix is '' or a folder with its closing slash, got {prefix!r}")
    validate_key(prefix[:-1])


def need_nonce(url: str, key: str, operation: str) -> None:
    """Refuse a name that two writers could use at once, where a backend cannot decide which of them wins.

    Commits, `stream.json` and all else that fences writers are small and so never come here. What does carries 16 hex
    digits that were drawn for it alone (rule K5), so that there is nobody to exclude.

    Raises:
        ValueError: the name holds no nonce.
    """
    if _NONCE.search(key) is None:
        raise ValueError(
            f"{url}: {operation} of {key}: what is streamed, copied or too large for one conditional request is not "
            "exclusive here, so its name must hold a nonce of 16 hex digits that nobody else draws; give it such a "
            "name, or bytes that fit one request"
        )


def too_long(url: str, key: str, size_bytes: int, max_bytes: int) -> FormatError:
    """The error of `get` with `max_bytes`."""
    return FormatError(
        f"{url}: {key} has {size_bytes} bytes, at most {max_bytes} are accepted here; it was damaged or is not ours",
        key=key,
        url=url,
        expected=max_bytes,
        got=size_bytes,
    )


def range_error(url: str, key: str, start: int, length: int, size_bytes: int) -> FormatError:
    """The error of `get_range` past the end."""
    return FormatError(
        f"{url}: {key} is truncated: bytes {start}..{start + length} were asked for, it has {size_bytes}",
        key=key,
        url=url,
        expected=start + length,
        got=size_bytes,
    )
