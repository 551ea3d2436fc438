"""From arguments to an exit status: chooses the command and says what went wrong, once, with what to do about it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from torch_delta.cli.arguments import build_parser
from torch_delta.cli.output import Output
from torch_delta.errors import TorchDeltaError
from torch_delta.store import open_store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch_delta.errors import Action

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2
_INTERRUPTED: Final = 130  # what a shell reports for a program ended by Ctrl-C

_WITHOUT_STREAM: Final = frozenset({"estimate"})
_RECEIVING: Final = frozenset({"pull", "follow", "anchor"})
_ADVICE: dict[Action, str] = {
    "retry": "the same command may succeed later",
    "resync": "start again from an anchor or a fresh copy of the base",
    "stop": "nothing will change until somebody changes what the message names",
}


def run(argv: Sequence[str] | None) -> int:
    """Parse and run one command; see `torch_delta.cli.main`."""
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or shown the help
        return stop.code if isinstance(stop.code, int) else USAGE
    if arguments.show_version:
        print(f"torch-delta {version('torch-delta')}")
        return OK
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        return _run_command(arguments)
    except BrokenPipeError:  # the reader of our output has seen enough: `torch-delta log URL | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run_command(arguments: argparse.Namespace) -> int:
    command = importlib.import_module(f"torch_delta.cli.command_{arguments.command}")
    with contextlib.ExitStack() as stack:
        given: list[object] = [arguments]
        if arguments.command not in _WITHOUT_STREAM:
            try:
                given.append(stack.enter_context(open_store(arguments.url)))
            except TorchDeltaError as error:  # nothing was asked yet: the URL itself is no good
                _tell(error, arguments)
                return USAGE
        try:
            status: int = command.run(*given, Output(as_json=arguments.json))
        except TorchDeltaError as error:
            _tell(error, arguments)
            return PROBLEM
    return status


def _tell(error: TorchDeltaError, arguments: argparse.Namespace) -> None:
    print(f"torch-delta: {type(error).__name__}: {error}", file=sys.stderr)
    if arguments.command in _RECEIVING:
        print(f"  ({error.action}: {_ADVICE[error.action]})", file=sys.stderr)
    if arguments.json:
        record = {"error": {"type": type(error).__name__, "message": str(error), "action": error.action}}
        print(json.dumps(record), flush=True)
