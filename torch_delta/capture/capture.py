"""Capture: the changes of an optimizer's model on this rank.

    optimizer.step() ──pre hook──▶ keepers copy bits (transient mode)
                     ──post hook─▶ keepers compare and add up ──▶ step listeners (a publisher)
    collect() ──▶ one change per owned box with changes, and a token ──▶ commit(token) | rollback(token)

`attach.bind` decides at construction what this rank owns; `history` remembers; `ledger` keeps the tokens. Nothing here
communicates after construction.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from torch_delta.capture import arrays
from torch_delta.capture.attach import bind, gather_digests
from torch_delta.capture.config import CaptureConfig
from torch_delta.capture.crew import share
from torch_delta.capture.history import Persistent, Transient
from torch_delta.capture.ledger import Ledger
from torch_delta.capture.memory import ExtraBytes, extra_bytes
from torch_delta.capture.optimizer_hooks import StepHooks
from torch_delta.capture.policy import mode_of
from torch_delta.capture.resolve import some
from torch_delta.capture.shardchange import ShardChange
from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import torch.distributed as dist
    from torch import nn

    from torch_delta.capture.source import Bits, Collected, OwnedBox, Region
    from torch_delta.capture.unit import Unit
    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Capture:
    """The changes of this rank's share of a model, exactly, across optimizer steps. A `StepSource`.

    Collective at construction (all ranks of `process_group` at the same point; one object gather and small self-test
    gathers), never afterwards, with one exception: parameters replaced before the first step (`accelerator.prepare`)
    are bound anew at the start of that step, on all ranks.

    Useful alone: `changes()` gives masks, indices, old and new bits and XOR deltas per owned shard, for every step or
    interval. One capture serves either `changes()` or a publisher, not both.

    Args:
        optimizer: any torch optimizer, wrapped by Accelerate or not, or several that together update the model; a step
            of several counts when the last in the sequence has stepped.
        model: the live model, wrapped and sharded as it will be trained.
        base_schema: the checkpoint the receivers have: names, shapes, serving dtypes. None: every parameter and
            persistent buffer under its checkpoint name, in `config.serving_dtype`.
        config: see `CaptureConfig`.
        process_group: ranks that together hold the model; None: all.

    Raises:
        CaptureError: this model, optimizer or layout cannot be captured exactly; all ranks raise.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        base_schema: Schema | None = None,
        *,
        config: CaptureConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._given = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self._config = config if config is not None else CaptureConfig()
        self._group = process_group
        self._model = model
        self._base = base_schema
        self._listeners: list[Callable[[int], None]] = []
        self._num_steps = 0
        self._num_collected_steps = 0
        self._step_seconds = 0.0
        self._is_fresh = False
        self._is_standalone: bool | None = None
        self._is_closed = False
        self._wants_ranks = True
        self._keepers: tuple[Persistent | Transient, ...] = ()
        self._bind()
        self._hooks = StepHooks(self._binding.optimizers, self._before_step, self._after_step)

    @property
    def schema(self) -> Schema:
        """The checkpoint tensors, the same on every rank."""
        return self._binding.schema

    @property
    def owned(self) -> Sequence[OwnedBox]:
        """This rank's boxes, ascending by (tensor, offset)."""
        return self._ledger.owned

    @property
    def constant(self) -> tuple[int, ...]:
        """Schema indices of tensors no model holds (`CaptureConfig.constant`); nobody owns them."""
        return self._binding.constant

    @property
    def mode(self) -> str:
        """`transient` or `persistent`: what the configuration resolved to."""
        return self._mode

    @property
    def wants_ranks(self) -> bool:
        """Whether a collect also reduces changes for `packed`, profile small; set between collects. Default: True."""
        return self._ledger.wants_ranks

    @wants_ranks.setter
    def wants_ranks(self, wanted: bool) -> None:
        self._wants_ranks = self._ledger.wants_ranks = wanted

    @torch.no_grad()
    def collect(self) -> Collected:
        """Take everything that changed in the owned boxes since the last collect. See `ChangeSource.collect`."""
        self._claim(is_standalone=False)
        with self._ledger.lock:
            started = time.perf_counter()
            lost = self._collect_all()
            steps = self._num_steps - self._num_collected_steps
            self._num_collected_steps = self._num_steps
            in_steps, self._step_seconds = self._step_seconds, 0.0
            return self._ledger.finish(
                num_steps=steps,
                seconds=time.perf_counter() - started,
                step_seconds=in_steps,
                info={"mode": self.mode} | ({"out_of_band": ",".join(lost[:8])} if lost else {}),
            )

    def commit(self, token: int) -> None:
        """The version of `token` exists. Any thread."""
        self._ledger.commit(token)

    def rollback(self, token: int) -> None:
        """The version of `token` does not exist; the next collect covers it and all later ones.

        Any thread; where snapshots live on an accelerator, one that works on the training stream.
        """
        self._ledger.rollback(token)

    def regions(self) -> Iterator[Region]:
        """Bits of every owned box as of the last collect, in `owned` order. Training thread, between steps."""
        return self._ledger.regions()

    def read(self, tensor: int, box: Box) -> Bits:
        """Bits of a box inside one owned box, as of the last collect. Training thread, between steps."""
        return self._ledger.read(tensor, box)

    def digests(self) -> dict[int, Digest]:
        """By schema index: digest of this rank's owned boxes as of the last collect. Ranks' digests add up."""
        return self._ledger.digests()

    def on_step(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Call `listener(step_number)` inside `optimizer.step()`, after each complete step. See `StepSource`."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    @torch.no_grad()
    def changes(self) -> dict[str, ShardChange]:
        """What changed in every owned shard since the previous call (or since construction). No stream needed.

        Returns:
            By model tensor name; shards without changes are there with empty indices.

        Raises:
            CaptureError: a publisher uses this capture, or a step is in progress.
        """
        self._claim(is_standalone=True)
        with self._ledger.lock:
            return {
                unit.name: ShardChange.of(unit, keeper.take(is_lost=is_lost))
                for (unit, keeper), is_lost in zip(self._pairs(), self._lost_flags(), strict=True)
            }

    def extra_bytes(self) -> ExtraBytes:
        """Memory this capture takes on this rank; the formulas are in `ExtraBytes`."""
        return extra_bytes(self._binding.units, self._keepers)

    def close(self) -> None:
        """Remove the hooks and free snapshots; optimizer and model are as before. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._hooks.remove()
            self._listeners.clear()
            self._ledger.close()
            self._keepers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self) -> None:
        self._binding = bind(self._given, self._model, self._base, self._config, self._group)
        units = self._binding.units
        self._on_host = all(unit.device.type == "cpu" for unit in units)
        self._largest_first = sorted(range(len(units)), key=lambda number: -units[number].numel)
        mode, placement = mode_of(self._config, units), self._config.placement
        self._mode: str = mode
        with torch.no_grad():
            self._keepers = tuple(
                Persistent(unit, placement) if mode == "persistent" or unit.is_buffer else Transient(unit)
                for unit in self._binding.units
            )
            self._ledger = Ledger(self._binding.schema, self._binding.units, self._keepers)
            self._ledger.wants_ranks = self._wants_ranks

    def _rebind_if_replaced(self) -> None:
        """Parameters replaced between attaching and the first step are looked up again, by all ranks together."""
        if not self._binding.is_stale():
            return
        if self._num_steps or self._is_standalone is not None:
            raise CaptureError(
                "the optimizer's parameters were replaced by other objects after training began (re-sharded, or "
                "prepared twice); close this capture and attach again"
            )
        before = gather_digests(self._ledger.digests(), self._group)
        self._bind()
        after = gather_digests(self._ledger.digests(), self._group)
        moved = [self.schema.tensors[number].name for number, digest in after.items() if before.get(number) != digest]
        if moved:
            raise CaptureError(
                f"weights changed while parameters were replaced after attaching ({some(moved)}); attach after "
                "accelerator.prepare / fully_shard and after loading weights",
                tensors=tuple(moved),
            )

    @torch.no_grad()
    def _before_step(self, number: int) -> None:
        started = time.perf_counter()
        with self._ledger.lock:
            self._rebind_if_replaced()
            self._refuse_graph_capture()
            self._each(lambda keeper: keeper.begin_step(), self._stepped_by(number))
        self._step_seconds += time.perf_counter() - started

    @torch.no_grad()
    def _after_step(self, number: int) -> None:
        started = time.perf_counter()
        with self._ledger.lock:
            self._each(lambda keeper: keeper.end_step(), self._stepped_by(number))
        self._step_seconds += time.perf_counter() - started
        if number != len(self._binding.optimizers) - 1:
            return
        self._num_steps += 1
        self._is_fresh = len(self._binding.optimizers) == 1
        try:
            for listener in tuple(self._listeners):
                listener(self._num_steps)
        finally:
            self._is_fresh = False

    def _pairs(self) -> Iterator[tuple[Unit, Persistent | Transient]]:
        return zip(self._binding.units, self._keepers, strict=True)

    def _stepped_by(self, number: int) -> list[Persistent | Transient]:
        """Of the units that an optimizer updates, largest first."""
        pairs = list(self._pairs())
        return [pairs[at][1] for at in self._largest_first if pairs[at][0].stepped_by == number]

    def _each(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Unit by unit: on several threads for weights in host memory, else on this one, whose stream they are on."""
        return share(work, items) if self._on_host else [work(item) for item in items]

    def _claim(self, *, is_standalone: bool) -> None:
        """Refuse a collect at the wrong moment or by two consumers."""
        if self._is_closed:
            raise CaptureError("this capture is closed")
        if self._is_standalone not in {None, is_standalone}:
            raise CaptureError(
                "one capture serves either changes() or a publisher: each would take what the other is missing. Make a "
                "second Capture"
            )
        self._is_standalone = is_standalone
        if self._hooks.is_stepping() and not self._is_fresh:
            raise CaptureError("the optimizer is in the middle of a step; collect before or after it")

    def _lost_flags(self) -> list[bool]:
        """Per unit, whether its old bits are lost; one host synchronisation per device."""

        def check(pair: tuple[Unit, Persistent | Transient]) -> torch.Tensor | None:
            unit, keeper = pair
            return keeper.check(is_fresh=self._is_fresh and unit.stepped_by >= 0)

        return arrays.read_flags(self._each(check, list(self._pairs())))

    def _collect_all(self) -> list[str]:
        """File a token's records; returns the units whose old bits were lost."""
        self._ledger.begin()
        try:
            lost = self._lost_flags()
            self._each(lambda number: self._ledger.take(number, is_lost=lost[number]), self._largest_first)
        except BaseException:
            self._ledger.abandon()
            raise
        return [unit.name for unit, is_lost in zip(self._binding.units, lost, strict=True) if is_lost]

    def _refuse_graph_capture(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "optimizer.step is being captured into a CUDA graph; its replays would not be seen. Step outside the "
                "graph"
            )
