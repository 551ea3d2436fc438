"""The probe: one run of a model's own `load_weights` on stand-ins, to learn where each checkpoint element lands.

It takes some tenths of a second and no memory to speak of, writes nothing, and leaves the model as it was. What it
learns is not believed yet: `reach.settle` checks that every element lands exactly once over all ranks, and
`LiveModel.prove` compares the live values with the base.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_delta.vllm.routing.affine import merge
from torch_delta.vllm.routing.boxes import targets_overlap
from torch_delta.vllm.routing.dtypes import TORCH_DTYPES
from torch_delta.vllm.routing.memory import LiveMemory, stale_after_writes
from torch_delta.vllm.routing.observer import Landing, Notes, Observer
from torch_delta.vllm.routing.tracking import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from torch_delta.format.schema import Schema
    from torch_delta.vllm.routing.affine import Piece


@dataclass(frozen=True, slots=True)
class Seen:
    """What the probe saw of one checkpoint tensor, under one of its names.

    Attributes:
        name: the checkpoint name.
        tensor: schema index of the tensor that holds its data.
        pieces: where its elements land, by storage; merged, each element at most once per place.
        reason: why it cannot be routed, a sentence; None if nothing speaks against it.
        used: whether its loader did anything at all with it.
    """

    name: str
    tensor: int
    pieces: tuple[tuple[int, Piece], ...]
    reason: str | None
    used: bool


def probe(
    model: nn.Module, schema: Schema, context: Callable[[], AbstractContextManager[object]]
) -> tuple[LiveMemory, list[Seen]]:
    """Run `load_weights` on stand-ins for all tensors of a schema.

    Args:
        model: the live model; nothing may write to it meanwhile.
        schema: of the stream; aliases are fed under their own names too, since an engine may keep them apart.
        context: what vLLM wants to be entered around loading.

    Returns:
        The model's memory, and what was seen per name, in schema order.
    """
    memory = LiveMemory.of(model)
    tracker, notes = Tracker(), Notes()
    names = [spec.name for spec in schema.tensors]
    stand_ins = []
    for feed, spec in enumerate(schema.tensors):
        stand_in = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        tracker.root(stand_in, feed)
        stand_ins.append(stand_in)
    device = next((tensor.device for tensor in model.parameters() if tensor.device.type != "meta"), None)
    observer = Observer(tracker, memory, notes)
    try:
        with torch.no_grad(), context(), device if device is not None else contextlib.nullcontext():
            _load(model, names, stand_ins, observer, notes)
    finally:
        moved = memory.restore()
    _blame_moves(moved, tracker, notes)
    return memory, _judge(model, schema, memory, notes)


def _load(
    model: Any, names: Sequence[str], stand_ins: Sequence[torch.Tensor], observer: Observer, notes: Notes
) -> None:
    """Feed everything; after an exception, charge it to the tensor fed last and go on behind it."""
    fed = 0

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal fed
        while fed < len(names):
            fed += 1
            yield names[fed - 1], stand_ins[fed - 1]

    while fed < len(names):
        start = fed
        try:
            with observer:
                model.load_weights(feed())
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            reason = f"its loader does not work on a stand-in ({type(error).__name__}: {text})"
            notes.spoil([fed - 1] if fed > start else range(fed, len(names)), reason)
            if fed == start:
                return
        else:
            if fed < len(names):
                notes.spoil(range(fed, len(names)), "load_weights returned without asking for it")
            return


def _blame_moves(moved: dict[str, int], tracker: Tracker, notes: Notes) -> None:
    """A parameter that was exchanged belongs to the feed it was exchanged for, else to all that landed nowhere."""
    landed = {landing.feed for landing in notes.landings}
    for name, storage in moved.items():
        origin = tracker.origins.get(storage)
        feeds = tracker.stained.get(storage, (frozenset(), ""))[0] if origin is None else frozenset([origin.feed])
        reason = f"its loader exchanges the parameter {name} for another tensor"
        notes.spoil(feeds or {o.feed for o in tracker.origins.values()} - landed, reason)


def _judge(model: nn.Module, schema: Schema, memory: LiveMemory, notes: Notes) -> list[Seen]:
    landings: dict[int, list[Landing]] = {}
    for landing in notes.landings:
        landings.setdefault(landing.feed, []).append(landing)
    data = [schema.index(spec.alias_of or spec.name) for spec in schema.tensors]
    _spoil_overwritten(notes)
    _spoil_collisions(notes, data, [spec.name for spec in schema.tensors])
    loaded = {landing.storage for landing in notes.landings} | {touch.storage for touch in notes.touches}
    stale = stale_after_writes(model, memory, loaded)
    seen = []
    for feed, spec in enumerate(schema.tensors):
        mine = landings.get(feed, [])
        reason = notes.spoiled.get(feed)
        if reason is None:
            reason = next((stale[landing.storage] for landing in mine if landing.storage in stale), None)
        if reason is None and feed in notes.used and not mine and spec.numel:
            reason = "its loader reads it and stores it nowhere"
        if reason is None and not mine and spec.name in memory.shared and spec.alias_of is None:
            # A data tensor of the stream that the engine has no memory of its own for.
            reason = f"the engine ties it to {memory.shared[spec.name]}, and the stream does not"
        by_storage: dict[int, list[Piece]] = {}
        for landing in mine:
            by_storage.setdefault(landing.storage, []).append(landing.piece)
        pieces = [(at, piece) for at, of_storage in by_storage.items() for piece in merge(of_storage)]
        seen.append(Seen(spec.name, data[feed], tuple(pieces), reason, feed in notes.used))
    return seen


def _spoil_overwritten(notes: Notes) -> None:
    """What is written over after it landed is not what lies there: composed loaders, biases zeroed on a rank."""
    touches: dict[int, list[Any]] = {}
    for touch in notes.touches:
        touches.setdefault(touch.storage, []).append(touch)
    for landing in notes.landings:
        for touch in touches.get(landing.storage, ()):
            if touch.order > landing.order and (touch.piece is None or targets_overlap(touch.piece, landing.piece)):
                notes.spoil([landing.feed], f"its loader writes over it afterwards ({touch.what})")


def _spoil_collisions(notes: Notes, data: Sequence[int], names: Sequence[str]) -> None:
    """Two tensors with data of their own must not share memory; nor may one land there in two ways."""
    by_storage: dict[int, dict[tuple[int, Piece], Landing]] = {}
    for landing in notes.landings:
        by_storage.setdefault(landing.storage, {}).setdefault((data[landing.feed], landing.piece), landing)
    for found in by_storage.values():
        ordered = sorted(found.values(), key=lambda landing: landing.piece.target)
        open_: list[Landing] = []
        for landing in ordered:
            open_ = [before for before in open_ if before.piece.target_end > landing.piece.target]
            for before in open_:
                if targets_overlap(before.piece, landing.piece):
                    for one, other in ((before, landing), (landing, before)):
                        notes.spoil([one.feed], f"it shares live memory with {names[other.feed]}")
            open_.append(landing)
