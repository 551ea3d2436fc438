"""What of SkyRL this package relies on. A release that changed any of it is refused by name, before a run starts.

SkyRL picks the engines of its `delta` backend through vLLM's two factories, under a name it registers only if nobody
has; that is the seat taken here. What of its own classes is used beside that is listed in `RELIED_ON`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch_delta.errors import UnsupportedFormat

BACKEND = "delta"
"""SkyRL's name of the backend whose seat is taken."""
SUPPORTED = "0.4.0"
"""The release this package was made for and is tested with."""

_SYNC = "skyrl.backends.skyrl_train.weight_sync"
RELIED_ON = (
    (f"{_SYNC}.register", "register_trainer_engines"),
    (f"{_SYNC}.register", "register_receive_engines"),
    (f"{_SYNC}.weight_senders", "SkyrlTrainerCapabilities.skyrl_handles_prefix_cache_reset"),
    (f"{_SYNC}.sources", "FsdpWeightSource.model"),
    (f"{_SYNC}.sources", "FsdpWeightSource.weight_prefix"),
    (f"{_SYNC}.control_plane", "SkyrlWeightSyncClient.fetch_weights"),
    (f"{_SYNC}.control_plane", "SkyrlWeightSyncClient.pause_generation"),
    (f"{_SYNC}.delta.trainer", "DeltaTrainerWeightTransferEngine._apply_receiver_update"),
    (f"{_SYNC}.delta.trainer", "DeltaTrainerWeightTransferEngine.skyrl_set_reset_prefix_cache"),
    (f"{_SYNC}.delta.trainer", "DeltaTrainerInitInfo.max_file_size_in_gb"),
)
"""Module and name of what is used of SkyRL; importing these needs SkyRL's vLLM."""


def installed() -> str | None:
    """The installed release of SkyRL, or None. Imports nothing of it."""
    try:
        return version("skyrl")
    except PackageNotFoundError:
        return None


def check_release() -> None:
    """Refuse a SkyRL that this package was not made for. Imports nothing of it.

    Raises:
        UnsupportedFormat: names the release and the one that is known.
    """
    found = installed()
    if found == SUPPORTED:
        return
    what = "SkyRL is not installed" if found is None else f"skyrl {found} is installed"
    older = "" if found is None or not found.startswith("0.3.") else " (its senders are of another kind)"
    raise UnsupportedFormat(
        f"{what}{older}; torch_delta_skyrl works with skyrl {SUPPORTED}. Install that release, or leave "
        "torch_delta_skyrl out: SkyRL's own delta backend then does the work",
        installed=found,
        expected=SUPPORTED,
    )


def check_seams() -> None:
    """Refuse a SkyRL in which something that is used has moved, whatever its version says.

    Raises:
        UnsupportedFormat: names what is missing.
    """
    check_release()
    missing = [f"{module}:{name}" for module, name in RELIED_ON if not _has(module, name)]
    if missing:
        raise UnsupportedFormat(
            f"skyrl {installed()} has no {', '.join(missing)}; it is not the release that torch_delta_skyrl knows. "
            f"Install skyrl {SUPPORTED} unchanged",
            missing=missing,
        )


def _has(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    for part in name.split("."):
        fields = getattr(found, "__dataclass_fields__", {})
        if not hasattr(found, part) and part not in fields:
            return False
        found = getattr(found, part, None)
    return True
