"""SkyRL's `delta_weight_sync` fields in our words: each keeps its meaning, or is refused with a message.

sync_dir                                the stream's URL: a directory, s3://, gs://
local_checkpoint_dir                    each host's working copy, as in SkyRL
publish_staging_dir                     where a trainer that starts again takes the stream's newest weights
max_file_size_in_gb                     `PublishConfig.part_bytes`, counted before compression: files are no larger
publish_num_workers                     `PublishConfig.num_encode_threads`
cloud_download_workers                  refused, unless left at its default: how many is not for a trainer to say
checkpoint_load_format                  refused, unless left at its default: a reload reads the mapped working copy
multi_thread_safetensors_max_workers    refused, unless left at its default, for the same reason
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch_delta.config import PublishConfig
from torch_delta.errors import RequestRefused

_BYTES_PER_GB = 1024**3
_LEAST_BYTES = 1 << 20
_FOREIGN = {
    "cloud_download_workers": "servers choose the number of their downloads themselves",
    "checkpoint_load_format": "a reload reads the host's mapped working copy, and seldom happens",
    "multi_thread_safetensors_max_workers": "a reload reads the host's mapped working copy, and seldom happens",
}


def publish_config(init_info: Any) -> PublishConfig:
    """What SkyRL's trainer-side init info means for our publisher.

    Args:
        init_info: SkyRL's `DeltaTrainerInitInfo`, or for 0.3.0, which has none, our `environment.DeltaSettings`.

    Raises:
        RequestRefused: a field with a meaning that has no counterpart was set to something else than its default.
    """
    defaults = {field.name: field.default for field in fields(init_info)}
    for name, why in _FOREIGN.items():
        if name not in defaults:
            continue
        value = getattr(init_info, name)
        if value != defaults[name]:
            raise RequestRefused(
                f"delta_weight_sync.{name} is {value!r}, which does nothing with torch_delta: {why}. Leave it at "
                f"{defaults[name]!r}",
                field=name,
                got=str(value),
            )
    size_bytes = int(init_info.max_file_size_in_gb * _BYTES_PER_GB)
    if size_bytes < _LEAST_BYTES:
        raise RequestRefused(
            f"delta_weight_sync.max_file_size_in_gb is {init_info.max_file_size_in_gb}; expected at least "
            f"{_LEAST_BYTES / _BYTES_PER_GB} (1 MiB)",
            field="max_file_size_in_gb",
        )
    threads = init_info.publish_num_workers
    chosen = {} if threads is None else {"num_encode_threads": threads}
    return PublishConfig(every=None, on_restart="refuse", part_bytes=size_bytes, **chosen)
