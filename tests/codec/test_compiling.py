"""When the compiled kernels are used, and that nothing depends on them."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from torch_delta.codec import compiling
from torch_delta.codec.compiling import WORTH_COMPILING, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable


def test_compiled_once_work_repays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(numba: Any) -> tuple[Callable[..., Any], list[Any]]:
        built.append(numba)
        return (lambda number: number + 1), [numba.types.int64(numba.types.int64)]

    kernel = Kernel(build)
    monkeypatch.setattr(compiling, "_spent_s", [])  # as in a process that has compiled nothing
    assert kernel.get(WORTH_COMPILING - 1) is None
    assert built == []
    assert kernel.get(1)(41) == 42
    assert kernel.get(0)(41) == 42
    assert len(built) == 1


def test_without_numba_numpy_does_everything_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # makes `import numba` fail
    compiling._numba.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "torch_delta"):
            for _ in range(2):
                kernel = Kernel(lambda _: pytest.fail("nothing to build with"))
                assert kernel.get(WORTH_COMPILING) is None
        assert [record.levelname for record in caplog.records if "numba is not installed" in record.message] == [
            "WARNING"
        ]
    finally:
        compiling._numba.cache_clear()


def test_small_work_never_imports_numba() -> None:
    code = (
        "import sys, numpy as np\n"
        "from torch_delta.codec.change import diff\n"
        "from torch_delta.codec.digest import digest_array\n"
        "a = np.arange(5000, dtype=np.uint16)\n"
        "digest_array(a), diff(a, a[::-1])\n"
        "sys.exit('numba' in sys.modules or 'torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
