"""What of SkyRL this package relies on. A release that changed any of it is refused by name, before a run starts.

SkyRL 0.4.0 picks the engines of its `delta` backend through vLLM's two factories, under a name it registers only if
nobody has; that is the seat taken there. 0.3.0 has no such backend: it picks a strategy, which makes senders, by two
functions that know two strategies, and is told of a third. What else of either is used is listed in `RELIED_ON`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch_delta.errors import UnsupportedFormat

BACKEND = "delta"
"""SkyRL's name of the backend whose seat is taken."""
ENGINES = "0.4.0"
"""The release in which trainers and servers are vLLM's weight transfer engines."""
SENDERS = "0.3.0"
"""The release in which trainers have a `WeightTransferStrategy` and its `WeightTransferSender`."""
SUPPORTED = (ENGINES, SENDERS)
"""The releases this package was made for and is tested with."""

SYNC = "skyrl.backends.skyrl_train.weight_sync"
_SERVERS = "skyrl.backends.skyrl_train.inference_servers"
_ENGINES = (
    (f"{SYNC}.register", "register_trainer_engines"),
    (f"{SYNC}.register", "register_receive_engines"),
    (f"{SYNC}.weight_senders", "SkyrlTrainerCapabilities.skyrl_handles_prefix_cache_reset"),
    (f"{SYNC}.sources", "FsdpWeightSource.model"),
    (f"{SYNC}.sources", "FsdpWeightSource.weight_prefix"),
    (f"{SYNC}.control_plane", "SkyrlWeightSyncClient.fetch_weights"),
    (f"{SYNC}.control_plane", "SkyrlWeightSyncClient.pause_generation"),
    (f"{SYNC}.delta.trainer", "DeltaTrainerWeightTransferEngine._apply_receiver_update"),
    (f"{SYNC}.delta.trainer", "DeltaTrainerWeightTransferEngine.skyrl_set_reset_prefix_cache"),
    (f"{SYNC}.delta.trainer", "DeltaTrainerInitInfo.max_file_size_in_gb"),
)
_CLIENT = f"{_SERVERS}.remote_inference_client"
_SENDERS = (
    (SYNC, "get_transfer_strategy"),
    (SYNC, "get_transfer_strategy_cls"),
    (f"{SYNC}.transfer_strategy", "WeightTransferStrategy.create_init_info"),
    (f"{SYNC}.transfer_strategy", "WeightTransferStrategy.create_sender"),
    (f"{SYNC}.transfer_strategy", "WeightTransferSender.send_chunks"),
    (f"{SYNC}.transfer_strategy", "WeightTransferSender.teardown"),
    (f"{SYNC}.transfer_strategy", "WeightSyncInitInfo.override_existing_receiver"),
    (_CLIENT, "RemoteInferenceClient._call_all_servers"),
    (_CLIENT, "RemoteInferenceClient.init_weight_update_communicator"),
    (_CLIENT, "RemoteInferenceClient.pause_generation"),
    (_CLIENT, "RemoteInferenceClient.resume_generation"),
    (_CLIENT, "RemoteInferenceClient.update_named_weights"),
)
RELIED_ON = {ENGINES: _ENGINES, SENDERS: _SENDERS}
"""By release: module and name of what is used of SkyRL. Importing those of `ENGINES` needs SkyRL's vLLM."""
SERVER_ARGUMENTS = f"{_SERVERS}.utils"
"""Module in which 0.3.0 chooses a server's backend; it holds one of the two functions by name."""


def installed() -> str | None:
    """The installed release of SkyRL, or None. Imports nothing of it."""
    try:
        return version("skyrl")
    except PackageNotFoundError:
        return None


def check_release() -> None:
    """Refuse a SkyRL that this package was not made for. Imports nothing of it.

    Raises:
        UnsupportedFormat: names the release and those that are known.
    """
    found = installed()
    if found in SUPPORTED:
        return
    what = "SkyRL is not installed" if found is None else f"skyrl {found} is installed"
    raise UnsupportedFormat(
        f"{what}; torch_delta_skyrl works with skyrl {' and '.join(SUPPORTED)}. Install one of these releases, or "
        "leave torch_delta_skyrl out",
        installed=found,
        expected=SUPPORTED,
    )


def has_senders() -> bool:
    """Whether the installed SkyRL is the one with strategies and senders. Imports nothing of it."""
    return installed() == SENDERS


def check_seams() -> None:
    """Refuse a SkyRL in which something that is used has moved, whatever its version says.

    Raises:
        UnsupportedFormat: names what is missing.
    """
    check_release()
    found = str(installed())
    missing = [f"{module}:{name}" for module, name in RELIED_ON[found] if not _has(module, name)]
    if missing:
        raise UnsupportedFormat(
            f"skyrl {found} has no {', '.join(missing)}; it is not the release that torch_delta_skyrl knows. "
            f"Install skyrl {found} unchanged",
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
