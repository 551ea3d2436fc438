"""The command line: `torch-delta log | verify | inspect | pull | follow | gc | doctor | estimate`.

`arguments` is the whole surface, `run` turns errors into messages and exit codes, each `command_*` does one command,
and `output` owns what a person or, with `--json`, a program gets to see. Importing this package loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; what the installed script `torch-delta` calls.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 all well, 1 a problem was found or met, 2 the command line is wrong.
    """
    from torch_delta.cli.run import run

    return run(argv)
