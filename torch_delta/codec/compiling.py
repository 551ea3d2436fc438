"""When a hot loop is compiled. numba is optional: without it the numpy code does everything, at reduced speed.

Starting numba costs half a second per process and compiling a kernel up to one more, which a short run never earns
back. So a kernel is compiled once its numpy twin has been given `WORTH_COMPILING` elements; both give the same bits,
and tests prove it. What one process compiled, the next ones load in milliseconds (`kept_code.py`): at once where numba
is running for another kernel already.

All kernels release the GIL and take any alignment (weights lie where a file put them).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from torch_delta.codec.kept_code import KeptCode

_logger = logging.getLogger("torch_delta")
_lock = threading.RLock()

WORTH_COMPILING = 1 << 24
"""Elements after which a kernel is compiled: some 30 ms of numpy work."""

Source = tuple[Callable[..., Any], list[Any]]
"""A function that numba can compile, and its signatures."""
Build = Callable[[Any], Source]
"""Makes a source, given the numba module."""

_spent_s: list[float] = []


class Kernel:
    """A function that is compiled once enough work has come by to repay it.

    Thread-safe. The count may lose an update when threads race, which delays compiling by one call.
    """

    def __init__(self, build: Build, worth: int = WORTH_COMPILING) -> None:
        self._build = build
        self._worth = worth
        self._function: Callable[..., Any] | None = None
        self._seen = 0
        self._has_looked = False

    def get(self, num_elements: int) -> Callable[..., Any] | None:
        """The compiled function, or None if numpy should do these elements."""
        if self._function is None:
            self._seen += num_elements
            if self._seen >= self._worth:
                return self.compile()
            if _spent_s and not self._has_looked:  # numba runs already, so that loading costs milliseconds
                self._make(only_if_kept=True)
        return self._function

    def compile(self) -> Callable[..., Any] | None:
        """Compile now, or load what another process compiled; None if numba is not installed."""
        if self._function is None:
            self._make(only_if_kept=False)
        return self._function

    def _parameters(self) -> tuple[str, ...]:
        """What a builder that makes several kernels was told about this one: an element width, for example.

        Two kernels of one function may have the same signature, where that holds addresses.
        """
        held = [cell.cell_contents for cell in self._build.__closure__ or ()]
        return tuple(repr(one) for one in held if isinstance(one, int | str | type))

    def _make(self, *, only_if_kept: bool) -> None:
        with _lock:
            self._has_looked = True
            if self._function is not None:
                return
            started = time.perf_counter()
            numba = _numba()
            if numba is None:
                return
            function, signatures = self._build(numba)
            compiled = numba.njit(nogil=True)(function)
            kept = KeptCode.of(function, self._parameters(), compiled.targetctx.codegen().magic_tuple())
            if kept is not None:
                if only_if_kept and not all(kept.has(signature) for signature in signatures):
                    return
                compiled._cache = kept  # where numba puts its own cache, when told to
            elif only_if_kept:
                return
            for signature in signatures:
                compiled.compile(signature)
            compiled.disable_compile()
            self._function = compiled
            _spent_s.append(time.perf_counter() - started)


def compiling_s() -> float:
    """Seconds this process has spent on starting numba and compiling: what a measurement of the work leaves out."""
    return sum(_spent_s)


@cache
def _numba() -> Any:
    """The numba module or None; decided, and logged, once per process."""
    try:
        import numba
    except ImportError as error:
        # ImportError is also what numba raises for a numpy it does not support.
        _logger.warning(
            "codec: numba is not installed (%s), so encoding and decoding run at a fraction of their speed; "
            "`pip install torch-delta[fast]` compiles the hot loops",
            error,
        )
        return None
    _logger.info("codec: hot loops compiled by numba %s", numba.__version__)
    return numba


def view(numba: Any, dtype: str, *, readonly: bool = True) -> Any:
    """Type of a 1-D contiguous array, by default one that is only read, at any alignment."""
    return numba.types.Array(getattr(numba.types, dtype), 1, "C", readonly=readonly, aligned=False)
