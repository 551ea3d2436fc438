"""One call for the common case: the checkpoint of a stream at a version, in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch_delta.receive.follower import Follower
from torch_delta.receive.local_checkpoint import LocalCheckpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch_delta.receive.reports import ApplyReport
    from torch_delta.store import Store


def pull(
    url: str | Store,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    base: str | os.PathLike[str] | None = None,
    timeout_s: float | None = 600.0,
    on_report: Callable[[ApplyReport], object] | None = None,
) -> LocalCheckpoint:
    """Bring the folder `path` to a version of the stream at `url`, starting from what is in it, `base` or an anchor.

    Args:
        url: of the stream, or an open store.
        path: the checkpoint folder; see `LocalCheckpoint`.
        version: wanted; the newest one if None.
        base: to copy from if `path` is empty.
        timeout_s: longest wait for `version` to be committed or for another process at `path`.
        on_report: called after each step.

    Returns:
        The checkpoint, at that version and proved.

    Raises:
        TorchDeltaError: as `LocalCheckpoint` and `Follower.apply_to`; the folder is whole and says its version.
    """
    if timeout_s is None:
        checkpoint = LocalCheckpoint(path, base=base)
    else:
        checkpoint = LocalCheckpoint(path, base=base, timeout_s=timeout_s)
    with Follower(url) as follower:
        until: int | Literal["head"] = "head" if version is None else version
        for report in follower.apply_to(checkpoint, until=until, timeout_s=timeout_s):
            if on_report is not None:
                on_report(report)
    return checkpoint
