"""Ranks as processes that may be killed: what the processes of test_processes.py run, and how they are started.

The key-value store lives in the test's own process, as with torchrun it lives in the launcher, so it survives any rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def launch(function, world_size, *, timeout_s=90.0, **arguments):
    """Run `function(rank, world_size, **arguments)` on every rank.

    Returns:
        (results of the ranks that ended well, exit codes), both by rank.
    """
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(_ROOT))
    command = [sys.executable, "-m", "tests.publish.processes", function.__name__, str(server.port), str(world_size)]
    ranks = [
        subprocess.Popen([*command, str(rank), json.dumps(arguments)], cwd=_ROOT, env=environment)
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        codes = [rank.wait(max(deadline - time.monotonic(), 0.1)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    results = {
        rank: json.loads(server.get(f"result/{rank}")) for rank in range(world_size) if server.check([f"result/{rank}"])
    }
    return results, codes


def publish_and_kill(rank, world_size, root, point, nth, victim):
    """Ranks step together, apart from the victim, which is killed at the `nth` passage of `point`."""
    import torch
    import torch.distributed as dist

    from tests.publish.sources import SteppedSource, flip, rows
    from tests.publish.support import config
    from torch_delta import crashpoints
    from torch_delta.errors import DeadlineExceeded, PublishFailed
    from torch_delta.publish import attach_source

    survivors = dist.new_group([other for other in range(world_size) if other != victim])
    source = SteppedSource(owned=rows(rank, world_size))
    publisher = attach_source(
        source, root, config=config(receipt_timeout_s=3.0, commit_timeout_s=1.0, wait_timeout_s=6.0, max_in_flight=2)
    )
    if rank == victim:
        crashpoints.arm(point, "kill", nth=nth)
    raised = None
    for step in range(1, 30):
        flip(source, step)
        try:
            source.step()
        except (PublishFailed, DeadlineExceeded) as error:
            raised = {
                "class": type(error).__name__,
                "step": step,
                "failures": sorted(getattr(error, "failures", {})),
                "peer": getattr(error, "peer", None),
            }
            break
        if rank == victim:
            publisher.wait()
        else:
            dist.all_reduce(torch.zeros(1), group=survivors)  # the training step's own collectives
    version = publisher.version
    publisher.detach()
    return {"raised": raised, "version": version}


def _main(name, port, world_size, rank, arguments):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    result = globals()[name](rank, world_size, **arguments)
    store.set(f"result/{rank}", json.dumps(result))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
    sys.stdout.flush()
    os._exit(0)  # peers may be dead: tearing the process group down would wait for them
