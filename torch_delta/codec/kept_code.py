"""Compiled kernels kept on disk, so that a machine compiles each once, and not each process of each run.

numba's own cache cannot do it: it knows a function by what is in its closure, and our kernels close over functions that
are made anew in every process, so that it would find none again. What is kept is the same as there: numba's reduced
`CompileResult`, here behind its SHA-256. The name of a file is a hash over all that its code depends on: sources of all
kernels, the function, what it was made with, its signature, the versions of Python, numba and llvmlite, the processor
and its features.

Loading a file runs what is in it, as with compiled Python files. The folder must therefore belong to the user and be
writable by nobody else; otherwise it is not used, and a warning says so. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import pickle
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger("torch_delta")

FOLDER: Final = "TORCH_DELTA_KERNEL_CACHE"
"""Variable that names the folder; empty keeps nothing. By default `torch_delta/kernels` in the user's cache."""

SOURCES: Final = (
    "capture/kernels.py",
    "codec/addresses.py",
    "codec/compiling.py",
    "codec/kernels.py",
    "codec/lanes.py",
    "codec/packed/kernels.py",
    "codec/packed/kernels_boundary.py",
    "codec/packed/kernels_gather.py",
    "codec/packed/kernels_locate.py",
    "codec/packed/kernels_streams.py",
    "format/encodings.py",
    "vllm/routing/kernels.py",
)
"""Files of this package that kernels are made of; a test holds them against what the kernels import."""

_DIGEST_BYTES = hashlib.sha256().digest_size


class KeptCode:
    """The kept code of one function, with the methods that a numba dispatcher calls on its cache.

    Processes may race: a file appears whole or not at all, and all of them would write the same code. A file that does
    not match its hash (the machine lost power while it was written) is compiled and written again.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity

    @classmethod
    def of(cls, function: Callable[..., Any], parameters: tuple[str, ...], machine: tuple[Any, ...]) -> Self | None:
        """The code of `function` on a processor, as numba's code generator tells it; None where nothing is kept.

        Args:
            function: that is compiled.
            parameters: what it was made with, if several of its name are made.
            machine: the processor.
        """
        folder = _folder()
        if folder is None or not _numba_can():
            return None
        name = f"{function.__module__}.{function.__qualname__}"
        return cls(folder, repr((_versions(), _sources_digest(), machine, name, parameters)))

    def _path(self, signature: Any) -> Path:
        key = hashlib.sha256(f"{self._identity} {signature}".encode()).hexdigest()
        return self._folder / f"{key[:40]}.code"

    def has(self, signature: Any) -> bool:
        """Whether there is a file for this signature."""
        return self._path(signature).exists()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """What numba made of the function for this signature; None if it is to be compiled. Called by numba."""
        try:
            data = self._path(signature).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _logger.info("codec: a kept kernel cannot be read and is compiled again: %s", error)
            return None
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            _logger.info("codec: a kept kernel is damaged and is compiled again: %s", self._path(signature))
            return None
        target_context.refresh()
        return _compile_result()._rebuild(target_context, *pickle.loads(data[_DIGEST_BYTES:]))  # noqa: S301 - our own file

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep what numba made; where that cannot be written, the next process compiles too. Called by numba."""
        data = importlib.import_module("numba.core.serialize").dumps(result._reduce())
        path = self._path(signature)
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(hashlib.sha256(data).digest() + data)
                    file.flush()
                    Path(file.name).replace(path)
                except OSError:
                    with contextlib.suppress(OSError):
                        Path(file.name).unlink()
                    raise
        except OSError as error:
            _logger.info("codec: a compiled kernel could not be kept in %s: %s", self._folder, error)


@cache
def _folder() -> Path | None:
    """The folder, made if need be; None if there is none that is safe to load code from."""
    named = os.environ.get(FOLDER)
    if named is not None and not named:
        return None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "torch_delta" / "kernels" if named is None else Path(named).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        _logger.info("codec: each process compiles its kernels: no folder to keep them in (%s)", error)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _logger.warning(
            "codec: each process compiles its kernels: others can write to %s (owner %d, mode %o), and loading code "
            "from there would run theirs; `chmod 700` it, or name another folder in %s",
            folder,
            found.st_uid,
            stat.S_IMODE(found.st_mode),
            FOLDER,
        )
        return None
    return folder


@cache
def _numba_can() -> bool:
    """Whether this numba has what its own cache is built on, which it does not promise to keep."""
    if hasattr(_compile_result(), "_reduce") and hasattr(_compile_result(), "_rebuild"):
        return True
    _logger.warning("codec: each process compiles its kernels: numba %s has another cache", _versions()[1])
    return False


def _compile_result() -> Any:
    return importlib.import_module("numba.core.compiler").CompileResult


@cache
def _versions() -> tuple[str, ...]:
    return sys.version, *(importlib.import_module(name).__version__ for name in ("numba", "llvmlite"))


@cache
def _sources_digest() -> str:
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(hashlib.sha256((package / name).read_bytes()).digest())
    return digest.hexdigest()
