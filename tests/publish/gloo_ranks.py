"""What the ranks of test_processes.py run under the shared launcher."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from tests.publish.sources import SCHEMA, ArraySource, edit, rows
from tests.publish.support import config
from torch_delta.capture.tensorsource import TensorSource
from torch_delta.errors import BaseMismatch
from torch_delta.publish import attach_source


def publish_three(rank, root):
    """Three versions and an anchor; two publishers of one job do not share keys."""
    world = dist.get_world_size()
    source, other = ArraySource(owned=rows(rank, world)), ArraySource(owned=rows(rank, world))
    with (
        attach_source(source, f"{root}/one", config=config()) as publisher,
        attach_source(other, f"{root}/two", config=config()) as second,
    ):
        for seed in (1, 2, 3):
            edit(source, seed)
            publisher.publish()
            edit(other, 10 + seed)
            second.publish()
        report = publisher.wait()
        publisher.anchor()
        second.wait()
    return [report.version, second.version, report.num_changed]


def publish_a_walk(rank, root, base):
    """Every rank walks full (name, tensor) pairs, as a framework's weight source yields them; each sends its share."""
    state = ArraySource()
    kinds = {"BF16": (np.int16, torch.bfloat16), "F32": (np.int32, torch.float32)}

    def walk():
        for spec in SCHEMA.tensors:
            integer, kind = kinds[spec.dtype]
            yield spec.name, torch.from_numpy(state.live[spec.name].view(integer)).view(kind)

    source = TensorSource(walk, SCHEMA)
    owned = [SCHEMA.tensors[item.tensor].name for item in source.owned]
    with attach_source(source, root, base=base, config=config()) as publisher:
        for seed in (1, 2):
            edit(state, seed)
            publisher.wait(publisher.publish())
    return owned


def publish_on_a_subgroup(rank, root):
    """Only ranks 1 and 2 hold the model; rank numbers of the group, not of the job, are what counts."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    source = ArraySource(owned=rows(rank - 1, 2))
    with attach_source(source, root, config=config(), group=group) as publisher:
        edit(source, 1)
        publisher.publish()
        return publisher.wait().version


def refuse_together(rank, root, base):
    """One rank's weights differ: every rank raises, nobody is left waiting."""
    source = ArraySource(owned=rows(rank, dist.get_world_size()))
    if rank == 1:
        source._seen["a.weight"][9, 0] ^= 1
    try:
        attach_source(source, root, base=base, config=config())
    except BaseMismatch as error:
        return error.tensors
    return None
