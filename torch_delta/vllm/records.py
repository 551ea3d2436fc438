"""What a rank knows about its own standing, and how it says so: small records that become JSON."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch_delta import errors
from torch_delta.errors import TorchDeltaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from torch_delta.codec.bits import Bits
    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.receive import Patch

Phase = Literal["init", "attach", "prepare", "apply", "finish", "verify"]
How = Literal["none", "patch", "mixed", "reload"]
"""Nothing to do; index writes; index writes and a reload of some tensors; a reload of everything."""

Reading = "Callable[[int, Box], Bits]"


class PlanLike(Protocol):
    """What the state machine needs of `routing.Plan`."""

    version: int
    num_elements: int
    nbytes: int
    unrouted: frozenset[int]
    summary: Any


class LiveLike(Protocol):
    """What the state machine needs of `routing.LiveModel`; see there."""

    reach: Any
    routed: frozenset[int]
    unrouted: Mapping[int, str]

    def settle(self, reaches: Sequence[Any], rank: int) -> None:
        """Decide with all ranks who owns what."""

    def withdraw(self, reasons: Mapping[int, str]) -> None:
        """Move tensors to the reload path."""

    def prove(self, read: Callable[[int, Box], Bits], *, cancelled: Callable[[], bool]) -> dict[int, str]:
        """Compare with known bits; what differs is withdrawn and returned."""

    def plan(self, patches: Sequence[Patch], *, cancelled: Callable[[], bool]) -> Any:
        """Resolve patches to writes."""

    def write(self, plan: Any) -> Any:
        """Write; gives back how to undo it."""

    def rollback(self, undo: Any) -> None:
        """Undo."""

    def digest(
        self, tensors: Iterable[int] | None = None, *, cancelled: Callable[[], bool]
    ) -> dict[int, Digest] | None:
        """Of the elements that this rank owns."""

    def forget(self) -> None:
        """Outstanding plans are stale."""

    def close(self) -> None:
        """End its threads. Idempotent."""


class Model(Protocol):
    """The served model of one rank: what only vLLM can do.

    Attributes:
        holds_served_files: its weights are those of the served checkpoint: not made up (dummy weights, F74), and not
            written to since. Cleared by whoever writes.
    """

    holds_served_files: bool

    def probe(self, schema: Any) -> Any:
        """Find out where each tensor of the schema goes; writes nothing. Any thread."""

    def reload(self, tensors: Iterator[tuple[str, np.ndarray[Any, Any], str]]) -> None:
        """Load a whole checkpoint (name, bits in the tensor's shape, safetensors dtype) into it. The worker's thread.

        Raises:
            Exception: whatever vLLM raises; the weights are then of no version.
        """

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is told to others.

    Attributes:
        phase: what was being done.
        type: name of the error's class.
        message: in full.
        action: what a caller can do: retry, resync or stop.
        facts: the error's facts, as far as JSON has them.
    """

    phase: Phase
    type: str
    message: str
    action: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, phase: Phase, error: BaseException) -> Failure:
        """Describe an error."""
        if isinstance(error, TorchDeltaError):
            facts = {name: plain(value) for name, value in error.facts.items()}
            return cls(phase, type(error).__name__, error.message, error.action, facts)
        return cls(phase, type(error).__name__, f"{type(error).__name__}: {error}", "stop")

    def error(self) -> TorchDeltaError:
        """The error again, for whoever shall raise it."""
        kind = getattr(errors, self.type, TorchDeltaError)
        if not (isinstance(kind, type) and issubclass(kind, TorchDeltaError)):
            kind = TorchDeltaError
        return kind(self.message, **self.facts)

    def to_json(self) -> dict[str, Any]:
        """For a reply."""
        return {
            "phase": self.phase,
            "type": self.type,
            "message": self.message,
            "action": self.action,
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, reply: Mapping[str, Any]) -> Failure:
        """Inverse of `to_json`."""
        return cls(reply["phase"], reply["type"], reply["message"], reply["action"], reply["facts"])


def plain(value: object) -> Any:
    """A fact as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A version that can be applied.

    Attributes:
        start: version it leads from; None when only a reload leads there.
        version: it leads to; a reload goes to the working copy's version, which may be beyond.
        how: it will be applied.
        reason: why by reload; empty otherwise.
        plan: of the writes, unless it is a reload.
        increments: what it adds to the digests, by tensor.
    """

    start: int | None
    version: int
    how: How
    reason: str = ""
    plan: Any = None
    increments: Mapping[int, Digest] = field(default_factory=dict)


@dataclass(kw_only=True)
class Identity:
    """Who a rank is.

    Attributes:
        rank: in the engine.
        size: ranks of the engine.
        host: name of the machine.
        pid: of the process.
        generation: made once per process, so that a restarted one can be told from the old one (F101).
    """

    rank: int = 0
    size: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    generation: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def consumer_id(self) -> str:
        """Names this rank among the consumers of a working copy."""
        return f"vllm-{self.pid}-{self.rank}-{self.generation}"
