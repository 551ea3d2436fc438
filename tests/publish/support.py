"""Publishers without processes: one in this thread, or several ranks as threads that share a map."""

from __future__ import annotations

import threading

from tests.publish.sources import ArraySource, rows
from torch_delta.config import PublishConfig
from torch_delta.publish.anchors import AnchorJob
from torch_delta.publish.coordination import Team
from torch_delta.publish.keyvalue import LocalKeyValue
from torch_delta.publish.lineage import open_lineage
from torch_delta.publish.publisher import Publisher
from torch_delta.store.local import LocalStore

FAST = {
    "receipt_timeout_s": 20.0,
    "commit_timeout_s": 0.2,
    "wait_timeout_s": 30.0,
    "attach_timeout_s": 20.0,
    "retry_delay_s": 0.01,
    "alive_s": 0,  # tests/publish/test_pulse.py has what it does
}


def config(**changes):
    return PublishConfig(**{**FAST, **changes})


def run_threads(world, function):
    """`function(rank, team)` on every rank; results in rank order, or the lowest rank's error after all have ended."""
    kv = LocalKeyValue()
    results, errors = {}, {}

    def run(rank):
        try:
            results[rank] = function(rank, Team(rank, world, kv))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(world)]


def open_rank(rank, team, root, *, base=None, source=None, store=None, **changes):
    """A publisher of one rank of a team."""
    job = AnchorJob(
        team=team,
        source=ArraySource(owned=rows(rank, team.world_size)) if source is None else source,
        store=LocalStore(root) if store is None else store,
        config=config(**changes),
        base=base,
    )
    return Publisher(open_lineage(job))
