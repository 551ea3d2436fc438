"""`torch-delta follow`: a checkpoint folder that stays at the newest version, and a command after each."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from torch_delta.cli.metered import Metered
from torch_delta.cli.run import OK
from torch_delta.cli.steps import Steps
from torch_delta.errors import TorchDeltaError
from torch_delta.receive import Follower, LocalCheckpoint

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from torch_delta.cli.output import Output
    from torch_delta.store import Store

_STDERR = 2  # the descriptor: sys.stderr may be something without one


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Keep `arguments.path` current until `arguments.until`, or for ever."""
    with output.working(f"opening {arguments.path}"):
        checkpoint = LocalCheckpoint(arguments.path, base=arguments.base)
    metered = Metered(store)
    with checkpoint, Follower(metered) as follower:
        reports = follower.apply_to(checkpoint, until=arguments.until, timeout_s=arguments.timeout)
        for report in Steps(output).taken(reports, metered):
            if arguments.hook is not None:
                run_hook(arguments.hook, checkpoint.path, report.version, as_json=output.as_json)
    return OK


def run_hook(command: str, path: Path, version: int, *, as_json: bool) -> None:
    """Run the user's command for a version; the folder stays as it is until it ends.

    No lock is held meanwhile: the command may well be a program that takes one itself, to read the folder.

    Raises:
        TorchDeltaError: it failed.
    """
    environment = os.environ | {"TORCH_DELTA_VERSION": str(version), "TORCH_DELTA_PATH": str(path)}
    # The shell is the point: the command comes from the command line of whoever runs this. With --json, stdout is ours.
    done = subprocess.run(  # noqa: S602
        command, shell=True, env=environment, stdout=_STDERR if as_json else None, check=False
    )
    if done.returncode != 0:
        raise TorchDeltaError(
            f"the command given with --exec ended with status {done.returncode} after version {version}: {command}",
            version=version,
            returncode=done.returncode,
        )
