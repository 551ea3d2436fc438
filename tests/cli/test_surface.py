"""The surface of the command line is frozen: scripts rely on every option, and a new one is a decision."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from torch_delta.cli import main
from torch_delta.cli.arguments import build_parser

SURFACE = {
    ("", "-h --help"),
    ("", "--version"),
    ("log", "url"),
    ("log", "-h --help"),
    ("log", "--json"),
    ("log", "-n --last"),
    ("verify", "url"),
    ("verify", "-h --help"),
    ("verify", "--json"),
    ("verify", "--checkpoint"),
    ("verify", "--full"),
    ("verify", "--quick"),
    ("inspect", "url"),
    ("inspect", "what"),
    ("inspect", "-h --help"),
    ("inspect", "--json"),
    ("inspect", "--slices"),
    ("pull", "url"),
    ("pull", "path"),
    ("pull", "-h --help"),
    ("pull", "--json"),
    ("pull", "--version"),
    ("pull", "--base"),
    ("pull", "--timeout"),
    ("follow", "url"),
    ("follow", "path"),
    ("follow", "-h --help"),
    ("follow", "--json"),
    ("follow", "--base"),
    ("follow", "--until"),
    ("follow", "--timeout"),
    ("follow", "--exec"),
    ("estimate", "old"),
    ("estimate", "new"),
    ("estimate", "-h --help"),
    ("estimate", "--json"),
    ("estimate", "--link-mbps"),
    ("doctor", "url"),
    ("doctor", "-h --help"),
    ("doctor", "--json"),
    ("anchor", "url"),
    ("anchor", "path"),
    ("anchor", "-h --help"),
    ("anchor", "--json"),
    ("anchor", "--timeout"),
    ("gc", "url"),
    ("gc", "-h --help"),
    ("gc", "--json"),
    ("gc", "--dry-run"),
    ("gc", "--keep-anchors"),
    ("gc", "--grace"),
    ("gc", "--budget"),
}


def options(parser: argparse.ArgumentParser, command: str = "") -> set[tuple[str, str]]:
    found = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= options(child, name)
        else:
            found.add((command, " ".join(action.option_strings) or action.dest))
    return found


def test_the_surface_is_the_frozen_one() -> None:
    assert options(build_parser()) == SURFACE


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "usage: torch-delta"),
        (["log"], "the following arguments are required: URL"),
        (["log", "x", "--last", "-1"], "-1 is negative"),
        (["log", "x", "--last", "few"], "'few' is no whole number"),
        (["pull", "x", "y", "--timeout", "soon"], "soon is not a positive number of seconds"),
        (["unknown"], "invalid choice: 'unknown'"),
        (["estimate", "x", "y", "--link-mbps", "0"], "0 is not a positive number"),
        (["follow", "x", "y", "--timeout", "nan"], "nan is not a positive number of seconds"),
        (["log", "hf://me/run"], "expected hf://buckets/owner/name/prefix"),
        (["log", "ftp://host/run"], "unknown scheme 'ftp'"),
    ],
)
def test_a_wrong_command_line_is_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_help_and_version_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    for command in ("log", "verify", "inspect", "pull", "follow", "gc", "doctor"):
        assert command in capsys.readouterr().out or main([command, "--help"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("torch-delta 0.")


def test_looking_at_a_stream_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\nfrom torch_delta.cli import main\nassert main(['log', '/nonexistent/stream']) == 1\n"
        "print(*sorted({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == ""
    assert "there is no stream here" in run.stderr
