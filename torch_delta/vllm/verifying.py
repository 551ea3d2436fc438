"""A digest of all live weights, in the background, against the digests of the version they should be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch_delta.errors import ChainError, DigestMismatch, RequestRefused
from torch_delta.format.digest import ZERO, Digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_delta.vllm.background import Together
    from torch_delta.vllm.config import Settings
    from torch_delta.vllm.standing import Standing

_MOST_ATTEMPTS = 5
_NAMES_SHOWN = 5


def verify(standing: Standing, settings: Settings, together: Together, cancelled: Callable[[], bool]) -> None:
    """Digest what every rank owns; weights that are not what they should be make the engine dirty.

    Raises:
        DigestMismatch: they are not; names the tensors.
        ChainError: there is nothing to verify, or updates kept coming.
    """
    standing.verifying = True
    try:
        for _ in range(_MOST_ATTEMPTS):
            if _verify_once(standing, settings, together, cancelled):
                return
        raise ChainError("updates kept coming while the live weights were digested; verify again when it is calmer")
    finally:
        standing.verifying = False


def _verify_once(standing: Standing, settings: Settings, together: Together, cancelled: Callable[[], bool]) -> bool:
    with standing.lock:
        live, host, version, digests = standing.live, standing.host, standing.version, standing.digests
    started_s = time.perf_counter()

    def digest() -> dict[int, Digest] | None:
        if standing.asleep:
            raise RequestRefused(standing.asleep)
        if live is None or host is None or version is None:
            raise ChainError(
                f"there is nothing to verify: {standing.broken or 'not attached, or the engine only reloads'}"
            )
        return live.digest(cancelled=cancelled)

    parts: list[Any] = together("verify", settings.timeout_s, digest)
    assert live is not None
    assert host is not None

    def undisturbed() -> tuple[bool, bool]:
        return parts[together.rank] is not None and standing.version == version, cancelled()

    views: list[tuple[bool, bool]] = together("verify", settings.timeout_s, undisturbed)
    if any(gone for _, gone in views):
        return True
    if not all(same for same, _ in views):
        return False
    wrong = [index for index, total in _add(parts).items() if total != digests[index]]
    names = tuple(host.schema.tensors[index].name for index in wrong)
    standing.verified_full = {
        "version": version,
        "ok": not wrong,
        "seconds": time.perf_counter() - started_s,
        "num_tensors": len(live.routed),
        "bytes": sum(host.schema.tensors[index].nbytes for index in live.routed),
        "wrong": list(names),
    }
    if wrong:
        reason = f"{len(names)} live tensors are not version {version}, such as {', '.join(names[:_NAMES_SHOWN])}"
        standing.spoil(dirty=f"{reason}; something else wrote to them")
        raise DigestMismatch(f"{reason}; the next update reloads all weights", version=version, tensors=names)
    return True


def _add(parts: Iterable[dict[int, Digest]]) -> dict[int, Digest]:
    total: dict[int, Digest] = {}
    for part in parts:
        for tensor, digest in part.items():
            total[tensor] = total.get(tensor, ZERO) + digest
    return total
