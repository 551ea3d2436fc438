"""A worker's live parameters seen in checkpoint coordinates: the one object that the engine works with."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from torch_delta.errors import ApplyFailed
from torch_delta.format.digest import ZERO, Digest
from torch_delta.vllm.routing.kernels import compiled_write
from torch_delta.vllm.routing.passes import count_differences, digest_route
from torch_delta.vllm.routing.plan import Plan, make_plan
from torch_delta.vllm.routing.probe import probe
from torch_delta.vllm.routing.reach import Reach, Route, settle
from torch_delta.vllm.routing.targets import place_dtype
from torch_delta.vllm.routing.write import Undo, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from torch_delta.codec.bits import Bits
    from torch_delta.format.box import Box
    from torch_delta.format.schema import Schema
    from torch_delta.receive.patches import Patch
    from torch_delta.vllm.routing.memory import LiveMemory
    from torch_delta.vllm.routing.probe import Seen

_logger = logging.getLogger("torch_delta")
_MAX_THREADS = 4  # more do not help: the write is bound by memory


def _never() -> bool:
    return False


class LiveModel:
    """The routing table of one worker, and what is done with it.

        live = LiveModel.probe(model, schema, context=lambda: set_current_vllm_config(config))
        live.settle(all_gather(live.reach), rank)
        live.withdraw(union(all_gather(live.prove(read_base))))
        plan = live.plan(patches)                       # while the engine generates
        check_summaries(all_gather(plan.summary), ...)
        undo = live.write(plan)                         # in the pause
        live.rollback(undo)                             # in the pause, if another rank failed

    Threads: `plan`, `prove` and `digest` may run in one background thread; `write` and `rollback` belong to the thread
    that runs the model, while it is paused.
    """

    def __init__(
        self, schema: Schema, memory: LiveMemory, seen: Sequence[Seen], *, num_threads: int | None = None
    ) -> None:
        self.schema = schema
        self._memory = memory
        self._seen = seen
        self._routes: dict[int, tuple[Route, ...]] | None = None
        self._unrouted: dict[int, str] = {}
        self._ignored: dict[int, str] = {}
        self._epoch = 0
        self._writer = Writer(num_threads or max(1, min(_MAX_THREADS, torch.get_num_threads())))
        self.reach = Reach.of(seen)
        """What this rank holds, for `settle` on every rank; small and picklable."""

    @classmethod
    def probe(
        cls,
        model: nn.Module,
        schema: Schema,
        *,
        context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        num_threads: int | None = None,
    ) -> LiveModel:
        """Learn where `model.load_weights` puts every checkpoint element; writes nothing to the model.

        Args:
            model: loaded; nothing may write to it meanwhile.
            schema: of the stream.
            context: entered around `load_weights`.
            num_threads: for writes to host memory; None for as many as torch uses, at most 4.
        """
        memory, seen = probe(model, schema, context)
        for storage in memory.storages.values():
            if storage.host is not None:
                compiled_write(place_dtype(storage.numel), storage.host.dtype)  # not later, while it serves
        return cls(schema, memory, seen, num_threads=num_threads)

    def settle(self, reaches: Sequence[Reach], rank: int) -> None:
        """Decide, together with the other ranks, what is routed; call it once, before anything else.

        Args:
            reaches: of all ranks of the engine, in rank order; the same on every rank.
            rank: of this one.
        """
        found = settle(self.schema, self._seen, self._memory, reaches, rank)
        self._routes = dict(found.routes)
        self._unrouted = dict(found.unrouted)
        self._ignored = dict(found.ignored)
        _logger.info(
            "routes: %d tensors in place, %d by reload, %d not loaded by this engine",
            len(self._routes),
            len(self._unrouted),
            len(self._ignored),
        )

    @property
    def _table(self) -> dict[int, tuple[Route, ...]]:
        if self._routes is None:
            raise RuntimeError("call LiveModel.settle with the reach of every rank first")
        return self._routes

    @property
    def routed(self) -> frozenset[int]:
        """Schema indices of the tensors that are applied by index writes; the same on all ranks."""
        return frozenset(self._table)

    @property
    def unrouted(self) -> Mapping[int, str]:
        """Schema index to the reason why a tensor goes by the reload path."""
        return self._unrouted

    @property
    def ignored(self) -> Mapping[int, str]:
        """Schema index to the reason why a tensor needs no apply: the model's loader stores it nowhere."""
        return self._ignored

    def withdraw(self, reasons: Mapping[int, str]) -> None:
        """Move tensors to the reload path."""
        for tensor, reason in reasons.items():
            if self._table.pop(tensor, None) is not None:
                self._unrouted[tensor] = reason
                self._epoch += 1

    def prove(self, read: Callable[[int, Box], Bits], *, cancelled: Callable[[], bool] = _never) -> dict[int, str]:
        """Compare this rank's live values with the base, bit for bit, and withdraw what differs.

        Args:
            read: bits of a box of a tensor as the live version has them, of the box's shape.
            cancelled: asked every few MiB; what was not compared by then stays routed.

        Returns:
            What was withdrawn: to be withdrawn on the other ranks too.
        """
        failed: dict[int, str] = {}
        for tensor, routes in list(self._table.items()):
            spec = self.schema.tensors[tensor]
            for route in routes:
                differing = count_differences(spec, route, lambda box, at=tensor: read(at, box), cancelled)  # type: ignore[misc]
                if differing is None:
                    self.withdraw(failed)
                    return failed
                if differing:
                    failed[tensor] = (
                        f"{differing} of {route.box.numel} elements in {route.storage.names[0]} do not hold the "
                        "checkpoint's bits: the engine transforms or repacks them after loading"
                    )
                    break
        self.withdraw(failed)
        return failed

    def plan(self, patches: Sequence[Patch], *, cancelled: Callable[[], bool] = _never) -> Plan:
        """Resolve patches to this rank's memory, outside the pause.

        Args:
            patches: of all versions from the live one (exclusive) to the target, in order.
            cancelled: asked between tensors.

        Raises:
            FormatError: a patch says something impossible; nothing was written.
            Cancelled: asked to stop.
        """
        epoch = self._epoch
        return make_plan(self.schema, self._table, self._unrouted, patches, epoch=epoch, cancelled=cancelled)

    def write(self, plan: Plan) -> Undo:
        """Write a plan, inside the pause.

        Raises:
            ApplyFailed: nothing was written, or it was undone (`undone` True), or live memory is torn (False).
        """
        if plan.epoch != self._epoch:
            raise ApplyFailed(
                f"the plan for version {plan.version} was made for another state of the engine; nothing was written. "
                "Prepare again",
                version=plan.version,
                undone=True,
            )
        self._epoch += 1
        try:
            return self._writer.write(plan)
        except ApplyFailed as error:
            if error.undone:
                self._epoch = plan.epoch
            raise

    def rollback(self, undo: Undo) -> None:
        """Take a write back; the plan may be written again afterwards.

        Raises:
            ApplyFailed: old bits do not read back (`undone` False): live memory is torn.
        """
        self._epoch += 1
        self._writer.rollback(undo)
        self._epoch = undo.plan.epoch

    def digest(
        self, tensors: Iterable[int] | None = None, *, cancelled: Callable[[], bool] = _never
    ) -> dict[int, Digest] | None:
        """This rank's share of the digests of live tensors; shares of all ranks add up to a tensor's digest.

        Args:
            tensors: schema indices of routed tensors; None for all.
            cancelled: asked every few MiB.

        Returns:
            By schema index; None if cancelled, or if a write came between.
        """
        epoch = self._epoch

        def stopped() -> bool:
            return cancelled() or self._epoch != epoch

        found: dict[int, Digest] = {}
        table = dict(self._table)
        for tensor in table if tensors is None else tensors:
            total = ZERO
            for route in table[tensor]:
                if route.owned:
                    share = digest_route(route, stopped)
                    if share is None:
                        return None
                    total += share
            found[tensor] = total
        return None if stopped() else found

    def forget(self) -> None:
        """Somebody else wrote to the live weights: plans made so far are void."""
        self._epoch += 1

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._writer.close()
