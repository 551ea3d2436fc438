"""Kernels that one process compiled and the next ones load: found again, never mistaken, never trusted blindly."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import torch_delta
from torch_delta.codec import compiling, kept_code
from torch_delta.codec.compiling import Kernel
from torch_delta.codec.kept_code import FOLDER, SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("numba")

PACKAGE = Path(torch_delta.__file__).parent
DIFFERENT = 7


def build(numba: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Closes over a function made anew each time, as the kernels do, which is what numba's own cache cannot take."""
    triple = numba.njit(lambda number: 3 * number)

    def total(values: Any) -> Any:
        result = np.int64(0)
        for value in values:
            result += triple(value)
        return result

    return total, [numba.types.int64(compiling.view(numba, kind)) for kind in ("int64", "int32")]


def hits(compiled: Any) -> tuple[int, int]:
    """Signatures that numba loaded, and those it compiled."""
    return sum(compiled._cache_hits.values()), sum(compiled._cache_misses.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "kernels"
    monkeypatch.setenv(FOLDER, str(folder))
    kept_code._folder.cache_clear()
    yield folder
    kept_code._folder.cache_clear()


def test_loaded_where_it_was_compiled_before(folder: Path) -> None:
    assert hits(Kernel(build).compile()) == (0, 2)
    assert len(list(folder.iterdir())) == 2
    assert (folder.stat().st_mode & 0o777) == 0o700
    loaded = Kernel(build).compile()
    assert hits(loaded) == (2, 0)
    assert loaded(np.arange(5)) == 30
    assert loaded(np.arange(5, dtype=np.int32)) == 30


def test_kernels_of_one_builder_are_told_apart(folder: Path) -> None:
    """By what it was told, where their signatures are the same: as those that are given addresses have."""

    def times(factor: int) -> Any:
        def build(numba: Any) -> Any:
            def multiply(number: Any) -> Any:
                return factor * number

            return multiply, [numba.types.int64(numba.types.int64)]

        return build

    for _ in range(2):
        assert [Kernel(times(factor)).compile()(7) for factor in (2, 3)] == [14, 21]
    assert len(list(folder.iterdir())) == 2


def test_other_processes_load_every_kernel_of_a_publish(folder: Path) -> None:
    code = (
        "import numpy as np\n"
        "from torch_delta.codec import kernels, compiling\n"
        "from torch_delta.codec.diff import diff\n"
        "from torch_delta.codec.digest import digest_array\n"
        "old = np.arange(1 << 20, dtype=np.uint16)\n"
        "new = old.copy()\n"
        "new[::1000] ^= 1\n"
        "chosen = [kernels.DIGEST_ROWS[2], kernels.CHANGED[2], kernels.DIGEST_CHANGES[2]]\n"
        "for kernel in chosen:\n"
        "    kernel.compile()\n"
        "print(digest_array(new), diff(old, new)[0].size)\n"
        "print(sum(sum(kernel.compile()._cache_misses.values()) for kernel in chosen))\n"
    )

    def run() -> list[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout.splitlines()

    first, second = run(), run()
    assert first[0] == second[0]
    assert int(first[1]) > 0
    assert second[1] == "0"


def test_a_kept_kernel_is_used_at_once_where_numba_runs(folder: Path) -> None:
    Kernel(build).compile()  # numba runs now
    assert Kernel(build).get(1)(np.arange(3)) == 9
    for file in folder.iterdir():
        file.unlink()
    kernel = Kernel(build)
    assert kernel.get(1) is None
    assert kernel.get(compiling.WORTH_COMPILING)(np.arange(3)) == 9


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:50] + b"?" + data[51:], lambda _: b""])
def test_a_damaged_file_is_compiled_and_written_again(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    Kernel(build).compile()
    good = {file: file.read_bytes() for file in folder.iterdir()}
    for file, data in good.items():
        assert damage(data) != data
        file.write_bytes(damage(data))
    compiled = Kernel(build).compile()
    assert hits(compiled) == (0, 2)
    assert compiled(np.arange(5)) == 30
    assert {file.name for file in folder.iterdir()} == {file.name for file in good}
    assert hits(Kernel(build).compile()) == (2, 0)


def test_other_sources_versions_and_processors_find_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(build).compile()
    for name in ("_sources_digest", "_versions"):
        with monkeypatch.context() as patched:
            patched.setattr(kept_code, name, lambda: DIFFERENT)
            assert hits(Kernel(build).compile()) == (0, 2)

    def other(machine: Any) -> Any:
        return kept_code.KeptCode.of(build, (), machine)._path("signature")

    assert other(("x86", "a", "+avx2")) != other(("x86", "a", "+avx512f"))


def test_nothing_is_loaded_from_a_folder_others_can_write(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernel(build).compile()
    for mode, owner in ((0o770, 0), (0o707, 0), (0o700, 1)):
        kept_code._folder.cache_clear()
        folder.chmod(mode)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "torch_delta"):
            caplog.clear()
            uid = folder.stat().st_uid + owner
            patched.setattr(kept_code.os, "geteuid", lambda uid=uid: uid)
            compiled = Kernel(build).compile()
        assert hits(compiled) == (0, 2)  # although the files are there
        assert compiled(np.arange(5)) == 30
        (warning,) = caplog.messages
        assert str(folder) in warning
        assert FOLDER in warning


def test_without_a_folder_every_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for named in ("", str(tmp_path / "file" / "below")):
        monkeypatch.setenv(FOLDER, named)
        kept_code._folder.cache_clear()
        with caplog.at_level(logging.INFO, "torch_delta"):
            assert Kernel(build).compile()(np.arange(5)) == 30
        assert Kernel(build).get(1) is None
    assert len([message for message in caplog.messages if "no folder to keep them in" in message]) == 1
    kept_code._folder.cache_clear()


def test_a_full_disk_keeps_nothing_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = []

    def replace(self: Path, target: Path) -> Path:
        failures.append(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    with caplog.at_level(logging.INFO, "torch_delta"):
        assert Kernel(build).compile()(np.arange(5)) == 30
    assert len(failures) == 2
    assert list(folder.iterdir()) == []
    assert len([message for message in caplog.messages if "could not be kept" in message]) == 2


def test_a_file_that_cannot_be_read_is_compiled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Kernel(build).compile()
    for file in tuple(folder.iterdir()):
        file.unlink()
        file.mkdir()  # reading it fails, whoever runs the test
    with caplog.at_level(logging.INFO, "torch_delta"):
        compiled = Kernel(build).compile()
    assert hits(compiled) == (0, 2)
    assert compiled(np.arange(5)) == 30
    assert len([message for message in caplog.messages if "cannot be read" in message]) == 2


def test_what_kernels_are_made_of_is_part_of_their_name() -> None:
    with_kernels = {
        path
        for path in PACKAGE.rglob("*.py")
        if "compiling import" in path.read_text() and "Kernel(" in path.read_text()
    }
    assert {str(path.relative_to(PACKAGE)) for path in with_kernels} <= set(SOURCES)
    for name in SOURCES:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("torch_delta"):
                module = node.module.removeprefix("torch_delta.").replace(".", "/")
                used = [
                    f"{module}/{alias.name}.py" if (PACKAGE / module).is_dir() else f"{module}.py"
                    for alias in node.names
                ]
                # How code is kept has no part in what it is, and an encoding's number needs only its own file.
                assert set(used) - {"codec/kept_code.py"} <= set(SOURCES) or name == "format/encodings.py", (name, used)


def test_no_two_kernels_are_kept_under_one_name() -> None:
    # Two of one name, parameters and signature would be loaded for each other.
    import numba

    names = []
    for source in SOURCES:
        module = importlib.import_module("torch_delta." + source.removesuffix(".py").replace("/", "."))
        for value in vars(module).values():
            for kernel in value.values() if isinstance(value, dict) else (value,):
                if isinstance(kernel, Kernel):
                    function, signatures = kernel._build(numba)
                    told = kernel._parameters()
                    names += [(function.__module__, function.__qualname__, told, str(each)) for each in signatures]
    assert len(names) > 30
    assert len(names) == len(set(names))
