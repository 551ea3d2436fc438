"""Run a function on several gloo ranks, each a fresh process, with a deadline.

The function lives in an importable module under `tests` (not in a test file, whose name depends on pytest), takes the
rank and JSON arguments, and returns something JSON can carry. Start-up costs seconds, so one run should do a lot.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def run_ranks(function, world_size: int, timeout_s: float = 120.0, **arguments):
    """Call `function(rank, **arguments)` on `world_size` ranks with torch.distributed up.

    Returns:
        What each rank returned, in rank order.

    Raises:
        AssertionError: a rank failed or the deadline passed; shows the end of every rank's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = f"{function.__module__}:{function.__qualname__}"
        environment = dict(
            os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(_ROOT), TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"
        )
        ranks = []
        for rank in range(world_size):
            log = Path(folder, f"log{rank}").open("w+")  # noqa: SIM115 - lives as long as the process
            command = [sys.executable, "-m", "tests._dist", target, str(rank), str(world_size), folder]
            command.append(json.dumps(arguments))
            process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            ranks.append((process, log))
        try:
            late = not _await([process for process, _ in ranks], time.monotonic() + timeout_s)
        finally:
            for process, _ in ranks:
                process.kill()
                process.wait()
        outputs = []
        for _, log in ranks:
            log.seek(0)
            outputs.append(log.read()[-4000:])
            log.close()
        if late or any(process.returncode for process, _ in ranks):
            shown = "\n".join(f"--- rank {rank}\n{output}" for rank, output in enumerate(outputs))
            raise AssertionError(f"{'deadline passed' if late else 'a rank failed'}\n{shown}")
        return [json.loads(Path(folder, f"result{rank}").read_text()) for rank in range(world_size)]


def _await(processes, deadline) -> bool:
    """Until all have ended or one has failed (the others would wait for it); False if the deadline passed."""
    pending = list(processes)
    while pending and not any(process.returncode for process in processes):
        if time.monotonic() > deadline:
            return False
        try:
            pending[0].wait(0.2)
        except subprocess.TimeoutExpired:
            pending.append(pending.pop(0))
        pending = [process for process in pending if process.poll() is None]
    return True


def _main(target: str, rank: int, world_size: int, folder: str, arguments: str) -> None:
    import torch.distributed as dist

    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    result = function(rank, **json.loads(arguments))
    Path(folder, f"result{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the other ranks may be in a collective: do not wait for them
