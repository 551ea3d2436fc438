"""`DeltaSync`: what a TRL trainer holds to ship its weights as deltas. Runs on every rank, on the training thread.

    optimizer steps ── captured ──► publish (all ranks) ──► commit ──► rank 0: prepare everywhere, pause, apply, resume
                                                                       └─ what it raises, all ranks raise

Nothing here is a collective: ranks agree through the process group's key-value store, with deadlines, so that a rank
whose server failed does not leave the others in a barrier (F31, F32).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

import torch_delta
from torch_delta.config import PublishConfig
from torch_delta.errors import TorchDeltaError
from torch_delta.publish.coordination import form_team
from torch_delta.store.base import Store
from torch_delta_trl.adapters import is_adapted, merged_source
from torch_delta_trl.contract import kind_of, refuse_what_cannot_be_exact
from torch_delta_trl.receivers import FleetReceivers, url_of
from torch_delta_trl.report import STANDING, Delivery, SyncReport

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch_delta import Publisher
    from torch_delta.capture.config import CaptureConfig
    from torch_delta.events import PublishReport
    from torch_delta.publish.coordination import Team
    from torch_delta.vllm import Fleet
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl.receivers import Receivers

logger = logging.getLogger("torch_delta")


class DeltaSync:
    """Keeps the vLLM engines of one TRL trainer at the trainer's weights, through a stream.

        sync = DeltaSync("s3://bucket/run-7", base="Qwen/Qwen3-0.6B")
        trainer = AsyncGRPOTrainer("Qwen/Qwen3-0.6B", ..., delta_sync=sync)     # from torch_delta_trl import ...

    Versions count commits of the stream and go on over restarts; the trainer's `model_version` counts synchronisations
    of this run. Both are logged.

    Args:
        stream: URL of the stream, as the trainer reaches it; or an open `torch_delta.store.Store`, which is left open.
        base: checkpoint that the servers start from: folder or Hub id; None is the model the trainer was given.
        servers: URLs of the vLLM servers; None is the one the trainer was configured with.
        token: for the servers' Authorization header.
        server_stream: URL of the stream as the engines reach it; None is `stream`. Needed beside an open store.
        publish: how to publish; its `every` is not used, the trainer's own interval is.
        capture: see `torch_delta.attach`; of a model with adapters, its placement alone.
        fleet: deadlines, and what to do about failing servers.
        init_info: further fields for the servers' initialisation; see `torch_delta.vllm.Fleet`.

    Raises:
        ValueError: an open store without `server_stream`.
    """

    def __init__(
        self,
        stream: str | os.PathLike[str] | Store,
        *,
        base: str | os.PathLike[str] | None = None,
        servers: Sequence[str] | None = None,
        token: str | None = None,
        server_stream: str | None = None,
        publish: PublishConfig | None = None,
        capture: CaptureConfig | None = None,
        fleet: FleetConfig | None = None,
        init_info: Mapping[str, object] | None = None,
    ) -> None:
        if isinstance(stream, Store) and server_stream is None:
            raise ValueError("server_stream: an open store is known to this process alone; give the engines its URL")
        self._root = stream
        self.stream = server_stream if server_stream is not None else str(stream)
        self.base = None if base is None else str(base)
        self._servers = servers
        self._token = token
        self._publish = dataclasses.replace(publish if publish is not None else PublishConfig(), every=None)
        self._capture = capture
        self._fleet = fleet
        self._init_info = init_info
        self._trainer: Any = None
        self._publisher: Publisher | None = None
        self._receivers: Receivers | None = None
        self._team: Team | None = None
        self._published_step: int | None = None
        self._synced_step: int | None = None
        self._last: SyncReport | None = None

    @property
    def publisher(self) -> Publisher | None:
        """The publisher of this rank while training runs."""
        return self._publisher

    @property
    def fleet(self) -> Fleet | None:
        """The servers, on rank 0 once training has begun: their status, adding and removing some. None if colocated."""
        receivers = self._receivers
        return receivers.fleet if isinstance(receivers, FleetReceivers) else None

    @property
    def last(self) -> SyncReport | None:
        """The last synchronisation that every engine took part in, or those that the fleet's policy asks for."""
        return self._last

    @property
    def weight_transfer(self) -> object:
        """What AsyncGRPOTrainer takes as `weight_transfer`: does nothing, because this object did it before."""
        from torch_delta_trl.async_grpo import SyncedTransfer

        return SyncedTransfer(self)

    def wire(self, trainer: Any) -> None:
        """Take over a trainer's synchronisation. On every rank, before `train`; the second time does nothing.

        Args:
            trainer: an AsyncGRPOTrainer, or a GRPOTrainer built by `torch_delta_trl.GRPOTrainer` or with its mixin.

        Raises:
            UnsupportedFormat: this release of TRL is not known.
            CaptureError: the trainer or its model cannot be followed exactly; says why.
            ValueError: this object is wired to another trainer.
        """
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            raise ValueError("this DeltaSync is wired to another trainer; each trainer needs its own")
        kind = kind_of(trainer)
        refuse_what_cannot_be_exact(trainer)
        if kind == "async":
            from torch_delta_trl.async_grpo import wire
        else:
            from torch_delta_trl.grpo import wire
        self._trainer = trainer
        wire(self, trainer)

    def begin(self) -> None:
        """Attach to the optimizer, and bring the engines to the stream's version. By the wired callback, every rank.

        Costs the engines nothing if they serve the trainer's weights already. An engine that sleeps now has no memory
        to write to: the synchronisation that wakes it up delivers everything.

        Raises:
            BaseMismatch: the trainer's weights are not the base's, nor those at the head of the stream.
            TorchDeltaError: no stream, no server, or not the same base; on every rank.
        """
        self.end(clean=False)
        trainer = self._trainer
        if trainer.optimizer is None:
            raise ValueError("the trainer has no optimizer yet: call train(); evaluation alone has nothing to publish")
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        base = self.base if self.base is not None else model.config.name_or_path
        self._team = form_team()
        self._publisher = self._attach(model, base)
        self._published_step = trainer.state.global_step
        try:
            if self._receivers is None:
                self._receivers = self._new_receivers()
            if not self._receivers.asleep:
                self._deliver(None, time.perf_counter())
        except BaseException:
            self.end(clean=False)  # the trainer lets go on the main process only
            raise

    def push(self) -> SyncReport:
        """Publish what the optimizer changed and bring the engines to it. By the wired callback, every rank.

        Raises:
            PublishFailed: not committed; the next synchronisation covers the changes. On every rank.
            TorchDeltaError: committed, and the engines did not take it; they serve the old version. On every rank.
        """
        started_s = time.perf_counter()
        return self._deliver(self._committed(), started_s)

    def sync(self, *, lost: bool = False) -> SyncReport:
        """Bring the engines to the live weights, publishing only if an optimizer step lies between. Every rank.

        Args:
            lost: the engines threw their weights away and need all of them.
        """
        if self._publisher is None:
            self.begin()
        step = self._trainer.state.global_step
        if self._synced_step == step and not lost:
            assert self._last is not None
            return self._last
        started_s = time.perf_counter()
        return self._deliver(self._committed() if self._published_step != step else None, started_s, lost=lost)

    def check_synced(self) -> None:
        """Before the trainer tells anybody of a new policy: refuse if it was not synchronised."""
        step = self._trainer.state.global_step
        if self._synced_step != step:
            raise TorchDeltaError(
                f"the trainer asks to send its weights at step {step}, DeltaSync last did at {self._synced_step}: its "
                "callback did not run. Wire it with DeltaSync.wire(trainer) before train(), and leave "
                "args.weight_sync_steps as it is while training",
                step=step,
            )

    def end(self, *, clean: bool = True) -> None:
        """Let go of the optimizer. By the wired callback at the end of training, every rank; harmless twice.

        Args:
            clean: publish what the last synchronisation does not cover, and wait for it; else stop at once.

        Raises:
            PublishFailed: the last version was not committed.
        """
        publisher = self._publisher
        if publisher is None:
            return
        try:
            if clean and self._published_step != self._trainer.state.global_step:
                self._committed()  # so that the stream ends where training did, and a later run finds its place
        finally:
            self._publisher = self._published_step = self._synced_step = None
            if clean:
                publisher.close()
            else:
                publisher.detach()

    def close(self) -> None:
        """Stop at once and let go of servers; they go on serving."""
        self.end(clean=False)
        receivers, self._receivers = self._receivers, None
        if receivers is not None:
            receivers.close()

    def _attach(self, model: Any, base: str) -> Publisher:
        """Where changes come from: the hooks of the trainer's optimizer, or a look at the merged weights."""
        if is_adapted(model):
            source = merged_source(model, base, self._capture)
            return torch_delta.attach_source(source, self._root, base=base, config=self._publish)
        return torch_delta.attach(
            self._trainer.optimizer, model, self._root, base=base, config=self._publish, capture=self._capture
        )

    def _new_receivers(self) -> Receivers:
        trainer = self._trainer
        if kind_of(trainer) == "grpo" and trainer.vllm_generation.mode == "colocate":
            from torch_delta_trl.colocated import ColocatedReceiver

            return ColocatedReceiver(trainer.vllm_generation, self.stream, self._init_info, config=self._fleet)
        return FleetReceivers(
            [url_of(trainer)] if self._servers is None else self._servers,
            self.stream,
            token=self._token,
            config=self._fleet,
            init_info=self._init_info,
        )

    def _committed(self) -> PublishReport:
        """Publish, and wait until every rank's part is in the stream."""
        publisher = self._publisher
        if publisher is None:
            raise ValueError("synchronisation before train(): the optimizer is not attached yet")
        report = publisher.wait(publisher.publish())
        self._published_step = self._trainer.state.global_step
        return report

    def _deliver(self, published: PublishReport | None, started_s: float, *, lost: bool = False) -> SyncReport:
        """Have the engines take the newest version; fail on all ranks or on none."""
        assert self._publisher is not None
        assert self._receivers is not None
        assert self._team is not None
        version, step, receivers = self._publisher.version, self._trainer.state.global_step, self._receivers
        done: list[Delivery] = []

        def local() -> bytes:
            if self._team is not None and (self._team.is_coordinator or receivers.on_every_rank):
                done.append(receivers.update(version, lost=lost))
            return b""

        self._team.agree(
            f"bring the engines to version {version}", local, lambda _: b"", timeout_s=receivers.timeout_s + 60.0
        )
        delivery = (
            done[0]
            if done
            else Delivery(prepare_s=0.0, pause_s=0.0, num_servers=0, num_behind=0, oldest_version=version)
        )
        report = SyncReport(
            step=step,
            version=version,
            published=published,
            delivery=delivery,
            total_s=time.perf_counter() - started_s,
        )
        self._synced_step, self._last = step, report
        if done:
            self._log(report)
        return report

    def _log(self, report: SyncReport) -> None:
        if not self._trainer.accelerator.is_main_process:
            return
        sink = self._trainer._metrics["train"]
        for name, value in report.metrics.items():
            if name in STANDING:
                sink[name].clear()  # the trainer logs means over its interval; of these only the newest means anything
            sink[name].append(value)
        logger.info("%s", report)
