"""The systems that `publish_follow.py` runs side by side, each behind the same few calls.

A peer is built around one base checkpoint folder and one empty working folder of its own. It is used by one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch


class Peer(Protocol):
    """One publisher and one or more followers of its stream, in this process."""

    name: str
    """Column title."""
    followers: Mapping[str, Callable[[], object]]
    """By title: bring one local checkpoint to the newest version: fetch, verify, write."""

    def publish(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Make `weights` (name -> full bf16 tensor) the next version; return when a follower could see it."""

    def wire_bytes(self) -> int:
        """Bytes of all objects that the newest version added to the stream, manifests and commits included."""

    def checkpoints(self) -> Mapping[str, Path]:
        """By title of the follower: the folder with its safetensors files."""

    def close(self) -> None:
        """Stop threads and release locks."""


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
