"""What a file system's answer means to a store: not found, or no clear answer, with facts and advice."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Literal

from torch_delta.errors import ObjectNotFound, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Phase = Literal["before", "naming", "named"]

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
# Errors of link and rename after which the name certainly was not made; anything else may be a lost reply.
_NOTHING_DONE = {
    errno.EACCES, errno.EDQUOT, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC, errno.ENOSYS,
    errno.ENOTDIR, errno.ENOTSUP, errno.EPERM, errno.EROFS,
}  # fmt: skip
_ADVICE = {
    errno.ENOSPC: "The disk is full: free space, then repeat",
    errno.EDQUOT: "The disk quota is used up: free space, then repeat",
    errno.EROFS: "The file system is mounted read-only: mount it for writing or choose another directory",
    errno.ENOENT: "The root directory is gone: was it deleted or unmounted?",
    errno.EACCES: "Permission denied: check owner and mode of the directory",
    errno.EPERM: "Permission denied: check owner and mode of the directory",
    errno.ELOOP: "A symbolic link below the root is never followed: replace it by a real directory or file",
    errno.ENOTDIR: "A file lies where a directory must be: move it away",
    errno.ESTALE: "The network file system lost its handle: check the mount, then repeat",
    errno.ENOTSUP: "This file system can neither link nor rename without replacing, so no object can be created safely",
}


@contextlib.contextmanager
def reading(root: Path, key: str, operation: str) -> Iterator[None]:
    """Translate OSError of a read below `root`.

    Raises:
        ObjectNotFound: the file system says that there is no such file.
        StoreUnavailable: it says anything else; "cannot look" is never "not there".
    """
    try:
        yield
    except OSError as error:
        if error.errno in _ABSENT and not (root.exists() and not root.is_dir()):
            url = root.as_uri()
            raise ObjectNotFound(f"{url}: there is no object {key}", key=key, url=url, operation=operation) from error
        raise _unavailable(root, key, operation, error, "absent") from error


@contextlib.contextmanager
def writing(root: Path, key: str, operation: str, phase: Phase = "before") -> Iterator[None]:
    """Translate OSError of a write below `root`.

    Args:
        root: of the store.
        key: what is written.
        operation: the store's method.
        phase: ``"before"`` the name is made, while it is made (``"naming"``), or after (``"named"``): whether an error
            leaves the outcome certain.

    Raises:
        StoreUnavailable: with fact `outcome`.
    """
    try:
        yield
    except OSError as error:
        certain = phase == "before" or (phase == "naming" and error.errno in _NOTHING_DONE)
        raise _unavailable(root, key, operation, error, "absent" if certain else "unknown") from error


def _unavailable(root: Path, key: str, operation: str, error: OSError, outcome: str) -> StoreUnavailable:
    code = error.errno or 0
    url = root.as_uri()
    advice = _ADVICE.get(code, "Check the directory and its mount, then repeat")
    said = f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"
    return StoreUnavailable(
        f"{url}: {operation} {key or '(root)'} failed: {said}. {advice}",
        key=key,
        url=url,
        operation=operation,
        outcome=outcome,
        errno=code,
    )
