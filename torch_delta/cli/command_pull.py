"""`torch-delta pull`: a checkpoint folder at one version, every byte of it verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.cli.metered import Metered
from torch_delta.cli.output import human_bytes
from torch_delta.cli.run import OK
from torch_delta.cli.steps import Steps
from torch_delta.errors import ChainError
from torch_delta.receive import Follower, LocalCheckpoint

if TYPE_CHECKING:
    import argparse

    from torch_delta.cli.output import Output
    from torch_delta.store import Store


def run(arguments: argparse.Namespace, store: Store, output: Output) -> int:
    """Bring `arguments.path` to version `arguments.at`, or to the newest."""
    metered = Metered(store)
    with Follower(metered) as follower:
        head = follower.head()
        target = head if arguments.at is None else arguments.at
        if target > head:
            raise ChainError(
                f"{store.url} has no version {target} yet, its newest is {head}; `torch-delta follow --until {target}` "
                "waits for it",
                local_version=None,
                target=target,
                missing=head + 1,
            )
        with output.working(f"opening {arguments.path}"):
            checkpoint = LocalCheckpoint(arguments.path, base=arguments.base, timeout_s=arguments.timeout)
        with checkpoint:
            reports = follower.apply_to(checkpoint, until=target, timeout_s=arguments.timeout)
            for _ in Steps(output).taken(reports, metered):
                pass
            size_bytes = sum(checkpoint.schema.tensors[index].nbytes for index in checkpoint.schema.data_indices)
            with output.progress("verifying every byte", size_bytes) as advance:
                proved = checkpoint.verify(on_bytes=advance)
    output.record({"path": str(checkpoint.path), "version": proved.version, "verified_bytes": proved.size_bytes})
    size = human_bytes(proved.size_bytes)
    output.line(f"{checkpoint.path} is version {proved.version}, {size} verified", style="bold green")
    return OK
