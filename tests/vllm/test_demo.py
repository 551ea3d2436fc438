"""`make demo-vllm`, whole, with fewer versions; its verdicts are tested one by one in tests/examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_demo_ends_with_exact_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo_vllm", "--out", str(out), "--versions", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nEXACT " in done.stdout
    assert re.findall(r"version (\d): equal(, and new)?", done.stdout) == [("0", "")] + [
        (str(version), ", and new") for version in range(1, 4)
    ]
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"\s+\d ", line)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for row in rows[1:]:
        assert float(row[7]) > 0, "no pause was measured"
    assert sum(int(row[6]) for row in rows[1:]) > 0, "no token was generated during a prepare"
    assert processes_naming(out) == []


def processes_naming(folder: Path) -> list[str]:
    """Command lines of living processes that mention the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found
