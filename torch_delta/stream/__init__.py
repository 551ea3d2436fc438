"""What writer and reader must both know of a stream in a store: identity, commits, anchors, and where its end is."""

from __future__ import annotations

from torch_delta.stream.stream import StoredCommit, Stream

__all__ = ["StoredCommit", "Stream"]
