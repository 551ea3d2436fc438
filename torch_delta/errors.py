"""Every error torch_delta raises on purpose.

    TorchDeltaError                     what, where, expected, got, what to do
    ├── StoreError                      a named object could not be read or written
    │   ├── ObjectNotFound              the store answered: there is no such object
    │   ├── ObjectExists                create-if-absent lost: the name is taken by other bytes
    │   └── StoreUnavailable            no clear answer (network, disk full, permissions)
    ├── FormatError                     stored bytes break a numbered rule of docs/format.md
    │   └── UnsupportedFormat           valid, but from a version or feature this reader does not know
    ├── ChainError                      the versions at hand do not lead to the wanted one
    ├── BaseMismatch                    two sides do not start from the same weights
    ├── DigestMismatch                  the result is not what the writer said it would be
    ├── Fenced                          another writer owns the stream
    ├── CaptureError                    this model or optimizer cannot be captured exactly
    ├── PublishFailed                   a version was not committed; nothing is lost
    ├── CheckpointBusy                  another process holds the local checkpoint
    ├── ApplyFailed                     a version could not be written to live parameters
    ├── ServerUnavailable               an inference server gave no answer
    ├── ServerRefused                   an inference server answered with an error
    ├── FleetFailed                     an operation did not succeed on servers that had to succeed
    └── DeadlineExceeded                a wait ended; names its phase and peer

`error.action` says what a caller can do: ``"retry"`` (the same call may succeed later), ``"resync"`` (start again from
an anchor or a fresh copy of the base) or ``"stop"`` (a person must change something). Facts ride as attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Action = Literal["retry", "resync", "stop"]


class TorchDeltaError(Exception):
    """Base of all errors of this package.

    Args:
        message: what happened, where, expected and got, and what to do about it.
        **facts: the same as values (key, version, tensor, expected, got, ...); each becomes an attribute and is listed
            in `facts`.
    """

    action: ClassVar[Action] = "stop"

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts: Mapping[str, object] = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, dict(self.facts)))


def _rebuild(cls: type[TorchDeltaError], message: str, facts: dict[str, object]) -> TorchDeltaError:
    """Unpickling hook: errors cross process boundaries (multiprocessing, gather) with their facts."""
    return cls(message, **facts)


class StoreError(TorchDeltaError):
    """An object could not be read or written. Facts: key, url, operation."""

    action: ClassVar[Action] = "retry"


class ObjectNotFound(StoreError):
    """The store answered that the object does not exist (never raised for 'could not ask')."""


class ObjectExists(StoreError):
    """Create-if-absent found the name taken by other bytes."""

    action: ClassVar[Action] = "stop"


class StoreUnavailable(StoreError):
    """The store gave no clear answer: unreachable, full, read-only, or it refused the credentials."""


class FormatError(TorchDeltaError):
    """Stored bytes break a rule of docs/format.md. Facts: rule, key."""

    action: ClassVar[Action] = "resync"


class UnsupportedFormat(FormatError):
    """A newer format version or a feature this reader does not know; upgrade torch_delta."""

    action: ClassVar[Action] = "stop"


class ChainError(TorchDeltaError):
    """No path of commits and anchors leads to the wanted version. Facts: local_version, target, missing."""

    action: ClassVar[Action] = "resync"


class BaseMismatch(TorchDeltaError):
    """The weights at hand are not the ones the stream starts from. Facts: tensors."""


class DigestMismatch(TorchDeltaError):
    """A result differs from the digest its writer published. Facts: tensor, version, expected, got."""

    action: ClassVar[Action] = "resync"


class Fenced(TorchDeltaError):
    """Another writer committed to this stream; this one must stop. Facts: version, owner."""


class CaptureError(TorchDeltaError):
    """The model, optimizer or layout cannot be captured exactly; refused when attaching. Facts: tensor."""


class PublishFailed(TorchDeltaError):
    """A version was not committed on any rank; the next version will contain its changes.

    Attributes:
        version: the version that failed.
        failures: what went wrong, by rank; the same on all ranks.
    """

    action: ClassVar[Action] = "retry"
    version: int
    failures: Mapping[int, str]


class RequestRefused(TorchDeltaError):
    """A server was asked for something it must not or cannot do, or its environment makes no sense. Facts: field."""


class ApplyFailed(TorchDeltaError):
    """Live weights could not be brought to a version.

    Attributes:
        undone: the weights are bit for bit what they were before; if not, only a full reload helps.
    """

    action: ClassVar[Action] = "resync"
    undone: bool


class CheckpointBusy(TorchDeltaError):
    """Another process holds the local checkpoint. Facts: path, holder."""

    action: ClassVar[Action] = "retry"


class ServerUnavailable(TorchDeltaError):
    """An inference server could not be reached or broke off its answer. Facts: url, phase."""

    action: ClassVar[Action] = "retry"


class ServerRefused(TorchDeltaError):
    """An inference server answered with an error. Facts: url, phase, status (of HTTP; None if the body says so)."""


class FleetFailed(TorchDeltaError):
    """An operation failed on servers of a fleet; the servers in `reports` did what was asked.

    Attributes:
        failures: what went wrong, by URL of the server.
        reports: of the servers that succeeded, by URL.
    """

    action: ClassVar[Action] = "retry"
    failures: Mapping[str, Exception]
    reports: Mapping[str, object]


class DeadlineExceeded(TorchDeltaError):
    """A wait ended without its event. Facts: phase, peer, timeout_s."""

    action: ClassVar[Action] = "retry"
