"""The whole surface of the command line. A test holds it frozen: what is here once, scripts rely on."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

_EPILOG = """\
exit status: 0 all well, 1 a problem was found or met, 2 the command line is wrong.
docs/cli.md describes the output of --json.
"""
_URL_HELP = "root of the stream: a directory, file:///absolute/path, s3:// gs:// az://bucket/prefix, hf://buckets/owner/name/prefix"
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
    _add_anchor(commands)
    _add_gc(commands)
    _add_doctor(commands)
    _add_estimate(commands)
    return parser


_Commands = argparse._SubParsersAction  # argparse gives the type no public name


def _add(commands: _Commands[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    command = _add_bare(commands, name, text)
    command.add_argument("url", metavar="URL", help=_URL_HELP)
    return command


def _add_bare(commands: _Commands[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    """A command that is about no stream."""
    command = commands.add_parser(
        name,
        help=text.partition(".")[0].partition(":")[0],
        description=textwrap.fill(text, 78),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    extent = command.add_mutually_exclusive_group()
    extent.add_argument("--full", action="store_true", default=True, help="read every object (the default)")
    extent.add_argument(
        "--quick",
        dest="full",
        action="store_false",
        help="read the small objects only, and see that the others are there with their sizes",
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


def _add_anchor(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(
        commands,
        "anchor",
        "Upload a checkpoint folder that follows the stream as a full copy of the version it is at, after digesting "
        "every byte of it. The trainer has nothing to do with it.",
    )
    command.add_argument("path", type=Path, metavar="PATH", help="folder that `pull` or `follow` keeps")
    command.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="S", help="seconds to wait for others at PATH (default: 600)"
    )


def _add_gc(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add(
        commands,
        "gc",
        "Delete what no reader needs: versions and anchors below the newest two complete anchors and below readers "
        "with a lease, and what dead writers left behind.",
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would be deleted; nothing is written")
    command.add_argument(
        "--keep-anchors",
        type=_anchors,
        default=2,
        metavar="N",
        help="newest anchors that stay, at least 2 (default: 2)",
    )
    command.add_argument(
        "--grace",
        type=_seconds,
        default=86_400.0,
        metavar="S",
        help="age from which parts that belong to nothing go; longer than any writer takes for a version "
        "(default: 86400)",
    )
    command.add_argument(
        "--budget", type=_count, metavar="BYTES", help="say by how much the stream is larger than this"
    )


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    _add(
        commands,
        "doctor",
        "Try out a store: credentials, exclusive creation in a race of threads, listing, clock, latency and "
        "throughput, and say what to fix. Writes some 40 MiB below a folder doctor/ of its own and removes it.",
    )


def _add_estimate(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = _add_bare(
        commands,
        "estimate",
        "Measure what publishing the difference of two checkpoints would cost: bytes of every encoding beside a full "
        "copy and the entropy bound, and seconds to encode and decode. Needs no stream and writes nothing.",
    )
    command.add_argument("old", type=Path, metavar="OLD", help="checkpoint folder before")
    command.add_argument("new", type=Path, metavar="NEW", help="checkpoint folder of the same model after")
    command.add_argument(
        "--link-mbps", type=_positive, metavar="X", help="also say how long the bytes take on a link of X megabits/s"
    )


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _anchors(text: str) -> int:
    """With one anchor alone, a reader that is at work would lose what it needs (rule L1)."""
    value = _count(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is too few: at least 2 anchors stay")
    return value


def _seconds(text: str) -> float:
    return _positive(text, "a positive number of seconds")


def _positive(text: str, what: str = "a positive number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not {what}")
    return value
