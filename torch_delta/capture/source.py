"""The seam between capture and publish: where changes come from, whoever finds them.

One `ChangeSource` lives on every rank of the training job. Together the sources own every element of every tensor of
the schema exactly once (aliases excepted: they have no elements of their own), decided when they were built, and each
reports the changes of its own boxes only. A source knows nothing of versions in a stream: it hands out one token per
`collect`, and is told later whether that change set became a version (`commit`) or not (`rollback`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_delta.codec.change import Change
    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Elements as unsigned integers of their own width (8-byte elements as uint64)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedBox:
    """A box of one checkpoint tensor whose changes this rank reports, and nobody else."""

    tensor: int
    """Index into `Schema.tensors`."""
    box: Box
    """In full-tensor coordinates of the checkpoint tensor; never empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """The bits of one owned box, for anchors and digests."""

    tensor: int
    box: Box
    bits: Bits
    """Shape `box.shape`, contiguous; valid until the iterator advances (copy what must stay)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What changed in this rank's boxes since the previous `collect` that was not rolled back."""

    token: int
    """Names this collect towards `commit` and `rollback`; grows by one per collect."""
    changes: tuple[Change, ...]
    """Ascending by (tensor, box offset); only boxes with changes; arrays on the host, owned by the change."""
    num_changed: int
    """Changed elements, and all elements of boxes re-sent whole."""
    num_resent: int = 0
    """Boxes re-sent whole because their weights moved outside `optimizer.step` and the old bits were not kept."""
    num_steps: int = 0
    """Optimizer steps since the previous collect; 0 for sources without an optimizer."""
    seconds: float = 0.0
    """Time this collect took; the caller's thread was busy for all of it."""
    step_seconds: float = 0.0
    """Time capture spent inside optimizer steps since the previous collect."""
    info: dict[str, str] = field(default_factory=dict)
    """Facts worth a log line (mode, out-of-band tensors); keys and values are short."""


@runtime_checkable
class ChangeSource(Protocol):
    """What a Publisher consumes. One per rank; no method is a collective.

    Life of a change set: `collect` returns everything since the last collect and takes the live weights as the new
    state; then either `commit(token)` once its version exists, or `rollback(token)`, after which the next collect
    covers it again (cumulatively: elements that went back to their old bits drop out). Several tokens may be open.
    Tokens commit oldest first; a rollback of a token also rolls back every later one.

    Threads: `collect`, `read` and `regions` are called by the training thread, between optimizer steps. `commit` and
    `rollback` may be called from any thread.
    """

    wants_ranks: bool
    """Whether `collect` reduces changes for profile *small* of the `packed` encoding (`Change.reduced`), which takes
    one more pass over the boxes in which something changed. Set by the publisher before each collect."""

    @property
    def schema(self) -> Schema:
        """The checkpoint tensors, the same on every rank; tied weights appear once, the other names as aliases."""
        ...

    @property
    def owned(self) -> Sequence[OwnedBox]:
        """This rank's boxes, ascending by (tensor, offset), disjoint; may be empty.

        Fixed after construction, with one exception: a `Capture` whose parameters are replaced between attaching and
        the first optimizer step (`accelerator.prepare`) decides anew, on all ranks, at the start of that step.
        """
        ...

    def collect(self) -> Collected:
        """Take everything that changed in the owned boxes since the last collect.

        Raises:
            CaptureError: the weights are in the middle of a step, or no longer what was attached to.
        """
        ...

    def commit(self, token: int) -> None:
        """The version of `token` exists; forget what a rollback would have needed."""
        ...

    def rollback(self, token: int) -> None:
        """The version of `token` does not exist; it and every later open token are covered by the next collect."""
        ...

    def regions(self) -> Iterator[Region]:
        """Bits of every owned box as of the last collect (the attached state before the first), in `owned` order."""
        ...

    def read(self, tensor: int, box: Box) -> Bits:
        """Bits of a box inside one owned box, as of the last collect; own storage, shape `box.shape`."""
        ...

    def digests(self) -> dict[int, Digest]:
        """By schema index: digest of this rank's owned boxes as of the last collect. Ranks' digests add up."""
        ...

    def close(self) -> None:
        """Remove hooks and free snapshots; the optimizer and the model are as before. Idempotent."""
        ...


@runtime_checkable
class StepSource(ChangeSource, Protocol):
    """A source that sees optimizer steps and can tell a publisher when one is complete."""

    def on_step(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Call `listener(step_number)` after every completed optimizer step, on the training thread, inside `step()`.

        The first step after construction is number 1. The listener may collect; what it raises comes out of
        `optimizer.step()`, after the step is complete and captured.

        Returns:
            A function that removes the listener.
        """
        ...
