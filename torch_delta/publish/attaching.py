"""The one line in a training loop: from an optimizer, a model and a URL to a Publisher, agreed between all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from torch_delta.capture.capture import Capture
from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.names import as_transformers_model
from torch_delta.config import PublishConfig
from torch_delta.errors import BaseMismatch
from torch_delta.publish import at_exit
from torch_delta.publish.anchors import AnchorJob
from torch_delta.publish.base import BaseCheckpoint, open_base
from torch_delta.publish.coordination import Team, form_team
from torch_delta.publish.lineage import open_lineage
from torch_delta.publish.publisher import Publisher
from torch_delta.store.base import Store
from torch_delta.store.url import open_store

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from torch import nn
    from torch.distributed import ProcessGroup

    from torch_delta.capture.source import ChangeSource
    from torch_delta.config import SnapshotMode

_logger = logging.getLogger("torch_delta")


def attach(
    optimizer: Any,
    model: nn.Module,
    url: str | os.PathLike[str] | Store,
    *,
    base: str | Path | None,
    every: int | None = None,
    mode: SnapshotMode | None = None,
    config: PublishConfig | None = None,
    capture: CaptureConfig | None = None,
    group: ProcessGroup | None = None,
) -> Publisher:
    """Publish every `every` optimizer steps what they changed. Called once by every rank, before training.

    A collective. The optimizer object stays in place: hooks are added, nothing is wrapped or replaced.

    Args:
        optimizer: the optimizer, or several that together update the model; see `Capture`.
        model: the live model, sharded and wrapped as it will be trained, holding the weights of `base`, or those at the
            head of the stream if there is one.
        url: root of the stream, empty or holding a stream to continue. See `open_store`; a `Store` is used as it is and
            left open.
        base: the checkpoint receivers have: a folder, or a Hub id. None starts the stream at a copy of the model, which
            is written first (an anchor), in `capture.serving_dtype`.
        every: overrides `config.every`.
        mode: overrides `config.mode`.
        config: see `PublishConfig`; the same on every rank.
        capture: what `PublishConfig` does not say (exclusions, placement of snapshots); its mode is `config.mode`.
        group: the ranks that hold the model between them; None is all ranks of the job.

    Raises:
        BaseMismatch: the model's weights are not those of the base, or not those at the head of the stream.
        CaptureError: this model, optimizer or base cannot be captured exactly.
        TorchDeltaError: the store or the base cannot be used; on every rank, with `.failures` by rank.
    """
    chosen = config if config is not None else PublishConfig()
    if every is not None:
        chosen = dataclasses.replace(chosen, every=every)
    if mode is not None:
        chosen = dataclasses.replace(chosen, mode=mode)
    team = form_team(group)
    store, checkpoint = _prepare(team, url, base, chosen)
    with contextlib.ExitStack() as undo:
        if store is not url:
            undo.callback(store.close)
        options = dataclasses.replace(
            capture if capture is not None else CaptureConfig(),
            mode=chosen.mode,
            steps_per_collect=chosen.every if chosen.every is not None else 1,
        )
        source = Capture(
            optimizer,
            model,
            None if checkpoint is None else checkpoint.schema,
            config=options,
            process_group=group,
        )
        undo.callback(source.close)
        job = AnchorJob(
            team=team,
            source=source,
            store=store,
            config=chosen,
            base=checkpoint,
            extra_files=_model_files(model),
        )
        publisher = _start(job, closes_store=store is not url)
        undo.pop_all()
    return publisher


def attach_source(
    source: ChangeSource,
    url: str | os.PathLike[str] | Store,
    *,
    base: str | Path | None = None,
    config: PublishConfig | None = None,
    group: ProcessGroup | None = None,
) -> Publisher:
    """Publish any change source, such as a framework's walk over (name, tensor) pairs. Called once by every rank.

    A collective. Sources that see optimizer steps (`StepSource`) publish by themselves every `config.every` of them;
    others when `Publisher.publish` is called.

    Args:
        source: one per rank; together they own every element once. Closed with the publisher, also if this fails.
        url: see `attach`.
        base: see `attach`.
        config: see `PublishConfig`; the same on every rank.
        group: the ranks that have a source; None is all ranks of the job.

    Raises:
        BaseMismatch: see `attach`.
        CaptureError: the sources do not own every element exactly once.
        TorchDeltaError: see `attach`.
    """
    chosen = config if config is not None else PublishConfig()
    with contextlib.ExitStack() as undo:
        undo.callback(source.close)
        team = form_team(group)
        store, checkpoint = _prepare(team, url, base, chosen)
        if store is not url:
            undo.callback(store.close)
        job = AnchorJob(team=team, source=source, store=store, config=chosen, base=checkpoint)
        publisher = _start(job, closes_store=store is not url)
        undo.pop_all()
    return publisher


def _prepare(
    team: Team, url: str | os.PathLike[str] | Store, base: str | Path | None, config: PublishConfig
) -> tuple[Store, BaseCheckpoint | None]:
    """Open the store and the base on every rank, or fail on every rank."""
    opened: list[Store] = []
    checkpoints: list[BaseCheckpoint] = []

    def local() -> bytes:
        opened.append(url if isinstance(url, Store) else open_store(url))
        if base is None:
            return b""
        checkpoints.append(open_base(base))
        return checkpoints[0].schema.id.encode()

    def decide(ids: list[bytes]) -> bytes:
        other = next((rank for rank, found in enumerate(ids) if found != ids[0]), None)
        if other is not None:
            raise BaseMismatch(
                f"ranks 0 and {other} see different tensors in the base {base}; every host needs the same checkpoint",
                base=str(base),
            )
        return b""

    try:
        team.agree("opening the store and the base", local, decide, timeout_s=config.attach_timeout_s)
    except BaseException:
        for store in opened:
            if store is not url:
                store.close()
        raise
    return opened[0], checkpoints[0] if checkpoints else None


def _start(job: AnchorJob, *, closes_store: bool) -> Publisher:
    publisher = Publisher(open_lineage(job), closes_store=closes_store)
    at_exit.remember(publisher)
    if job.team.is_coordinator:
        _logger.info("attached to %s at version %d", job.store.url, publisher.version)
    return publisher


def _model_files(model: nn.Module) -> dict[str, bytes]:
    """The configuration of a transformers model, so that an anchor without a base opens like any checkpoint."""
    inner = as_transformers_model(model)
    if inner is None:
        return {}
    settings: Any = inner.config
    return {"config.json": settings.to_json_string(use_diff=True).encode()}
