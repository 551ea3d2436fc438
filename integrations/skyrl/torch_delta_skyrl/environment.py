"""What SkyRL 0.3.0 has no configuration for: the words of the later `delta_weight_sync` block, as variables.

Each is ``TORCH_DELTA_SKYRL_`` and the word in capitals:

    SYNC_DIR                the stream: a directory, s3://, gs://
    BASE_MODEL_PATH         the checkpoint that servers start from: `trainer.policy.model.path`
    LOCAL_CHECKPOINT_DIR    each host's working copy; by default each server chooses its own folder
    PUBLISH_STAGING_DIR     see `torch_delta_skyrl.settings`; by default in the user's cache
    MAX_FILE_SIZE_IN_GB     see there
    PUBLISH_NUM_WORKERS     see there

The first two must be set.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch_delta.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "TORCH_DELTA_SKYRL_"
_READERS: dict[str, Callable[[str], Any]] = {"max_file_size_in_gb": float, "publish_num_workers": int}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSettings:
    """Settings of a run, the same on every rank."""

    sync_dir: str
    """The stream's URL."""
    base_model_path: str
    """Folder or Hub id of the checkpoint that servers start from."""
    publish_staging_dir: str
    """Folder on a trainer's host for the newest weights of a stream that stands elsewhere than the trainer."""
    local_checkpoint_dir: str | None = None
    """Each host's working copy; None leaves it to the server."""
    max_file_size_in_gb: float = 1.0
    """Limit of a payload file, in GiB, before compression."""
    publish_num_workers: int | None = None
    """Threads per rank that encode and upload; None for a number that fits the machine."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read the variables.

        Raises:
            RequestRefused: one is missing, unknown, or makes no sense; names it.
        """
        env = os.environ if environment is None else environment
        names = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        said = {name: text for name, text in env.items() if name.startswith(PREFIX) and text}
        unknown = sorted(said.keys() - names.keys())
        if unknown:
            raise RequestRefused(f"unknown variable {unknown[0]}; known: {', '.join(names)}", field=unknown[0])
        for name in (PREFIX + "SYNC_DIR", PREFIX + "BASE_MODEL_PATH"):
            if name not in said:
                raise RequestRefused(
                    f"{name} is not set; skyrl 0.3.0 has no delta_weight_sync block, so that the trainer's environment "
                    "names the stream and the checkpoint it starts from",
                    field=name,
                )
        values = {names[name]: _read(name, names[name], text) for name, text in said.items()}
        values.setdefault("publish_staging_dir", _default_staging(values["sync_dir"], env))
        return cls(**values)


def _read(name: str, field: str, text: str) -> Any:
    reader: Callable[[str], Any] = _READERS.get(field, str)
    try:
        return reader(text)
    except ValueError as error:
        raise RequestRefused(f"{name} is {text!r}; expected a number", field=name, got=text) from error


def _default_staging(sync_dir: str, env: Mapping[str, str]) -> str:
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(cache / "torch_delta" / "skyrl" / hashlib.sha256(sync_dir.encode()).hexdigest()[:16])
