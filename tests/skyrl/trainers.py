"""A trainer rank as SkyRL builds it: SkyRL's own functions, configuration and client, over a source of a few tensors.

Imports SkyRL inside functions: only the lane that has it calls them.
"""

from __future__ import annotations

import os
import typing
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def take_seat() -> None:
    """What a training script does first. SkyRL asks for Python 3.12, where one typing name has grown."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SkyRL's and its dependencies' own
        import torch_delta_skyrl

        torch_delta_skyrl.register()
        import skyrl.backends.skyrl_train.weight_sync.weight_senders
        import skyrl.train.config.config
        import skyrl.train.utils.utils  # noqa: F401


def weight_source(tensors: dict[str, Any] | None, walks: list[int] | None = None) -> Any:
    """SkyRL's (vLLM's) `WeightSource` over a dict that a test changes in place; None stands for no source."""
    if tensors is None:
        return None
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            for name, tensor in tensors.items():
                yield name, tensor.clone()
            if walks is not None:
                walks.append(len(tensors))

    return Source()


def build(
    base: Path,
    sync_dir: str | Path,
    urls: list[str],
    source: Any,
    *,
    folder: Path,
    rank: int = 0,
    **delta: Any,
) -> Any:
    """The trainer engine of a rank, through SkyRL's `build_trainer_engine` and its configuration.

    Args:
        base: checkpoint trained and served.
        sync_dir: `delta_weight_sync.sync_dir`.
        urls: of the servers.
        source: this rank's `WeightSource`.
        folder: for what SkyRL would put under ``/tmp``.
        rank: of the trainer.
        delta: further fields of `delta_weight_sync`.
    """
    os.environ.setdefault("RAY_ADDRESS", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine
        from skyrl.train.config.config import DeltaWeightSyncConfig, InferenceEngineConfig

        fields = {
            "local_checkpoint_dir": str(folder / "checkpoint"),
            "publish_staging_dir": str(folder / f"staging-{rank}"),
        } | delta
        config = InferenceEngineConfig(
            weight_sync_backend="delta", delta_weight_sync=DeltaWeightSyncConfig(sync_dir=str(sync_dir), **fields)
        )
        return build_trainer_engine(
            ie_cfg=config,
            colocate_all=False,
            rank=rank,
            inference_world_size=len(urls),
            source_factory=lambda _dtype, _backend: source,
            draft_source_factory=lambda _dtype: None,
            server_urls=urls,
            data_parallel_size=1,
            base_model_path=str(base),
        )


def end(engine: Any) -> None:
    """What SkyRL does with an engine at the end."""
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import teardown_engine

    teardown_engine(engine)
