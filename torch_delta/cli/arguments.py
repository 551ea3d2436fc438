"""The whole surface of the command line. A test holds it frozen: what is here once, scripts rely on."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

_EPILOG = """\
exit status: 0 all well, 1 a problem was found or met, 2 the command line is wrong.
docs/cli.md describes the output of --json.
"""
_URL_HELP = "root of the stream: a directory, file:///absolute/path"
_BASE_HELP = (
    "checkpoint folder or Hub id (name or name@revision) that the stream starts from; copied to PATH the first time, "
    "needless if PATH holds a checkpoint or the stream has an anchor"
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="torch-delta",
        description="Look at, check and follow streams of weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", dest="show_version", action="store_true", help="show the version of torch_delta and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_log(commands)
    _add_verify(commands)
    _add_inspect(commands)
    _add_pull(commands)
    _add_follow(commands)
    return parser


_Commands = argparse._SubParsersAction  # argparse gives the type no public name


def _add(commands: _Commands[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text.partition(".")[0].partition(":")[0],
        description=textwrap.fill(text, 78),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("url", metavar="URL", help=_URL_HELP)
    command.add_argument("--json", action="store_true", help="JSON for programs instead of tables; see docs/cli.md")
    return command


def _add_log(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(commands, "log", "List the versions of a stream.")
    command.add_argument(
        "-n", "--last", type=_count, default=20, metavar="N", help="show the newest N versions, 0 for all (default: 20)"
    )


def _add_verify(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(
        commands,
        "verify",
        "Read a whole stream and prove it: seals, hash chain, bytes of every part and anchor, every slice, and that "
        "the slices lead from state to state. Needs no copy of the weights.",
    )
    command.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="also digest every weight in this folder and say which version it is, or which tensors are not",
    )


def _add_inspect(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(commands, "inspect", "Show what a version or a single object is made of.")
    command.add_argument(
        "what",
        metavar="VERSION|KEY",
        help="a version number, or an object's key such as parts/.../....safetensors",
    )
    command.add_argument(
        "--slices", type=_count, default=20, metavar="N", help="slices listed per part, 0 for all (default: 20)"
    )


def _add_pull(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(commands, "pull", "Build or bring up to date a checkpoint folder, then verify every byte of it.")
    command.add_argument("path", type=Path, metavar="PATH", help="folder of the checkpoint, on a local disk")
    command.add_argument(
        "--version", dest="at", type=_count, metavar="VERSION", help="the version to build (default: the newest)"
    )
    command.add_argument("--base", metavar="BASE", help=_BASE_HELP)
    command.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="seconds to wait for others at PATH (default: 600)"
    )


def _add_follow(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(commands, "follow", "Keep a checkpoint folder at the newest version of a stream, until interrupted.")
    command.add_argument("path", type=Path, metavar="PATH", help="folder of the checkpoint, on a local disk")
    command.add_argument("--base", metavar="BASE", help=_BASE_HELP)
    command.add_argument("--until", type=_count, metavar="VERSION", help="end once this version is reached")
    command.add_argument(
        "--timeout", type=_seconds, metavar="S", help="end with status 1 after S seconds without a new version"
    )
    command.add_argument(
        "--exec",
        dest="hook",
        metavar="CMD",
        help="shell command to run after each version, with TORCH_DELTA_VERSION and TORCH_DELTA_PATH set; no newer "
        "version is written to PATH until it ends, and a failing one ends the following with status 1",
    )


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value
