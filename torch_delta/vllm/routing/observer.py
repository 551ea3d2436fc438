"""The dispatch mode of the probe: lets `load_weights` run without a single write to live memory.

Every operation that would write to a tensor that existed before is noted and skipped. Copies from checkpoint tensors
become `Landing`s; anything else is a `Touch`, which spoils the routes it overlaps. Reads run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_delta.vllm.routing.affine import NotAffine, Piece, make_piece
from torch_delta.vllm.routing.tracking import Tracker, is_dense, storage_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_delta.vllm.routing.memory import LiveMemory

_aten = torch.ops.aten
_COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})


@dataclass(frozen=True, slots=True)
class Landing:
    """A copy from a checkpoint tensor into live memory.

    Attributes:
        feed: the checkpoint tensor.
        storage: identity of the storage.
        piece: which elements, and where.
        order: position among all writes.
    """

    feed: int
    storage: int
    piece: Piece
    order: int


@dataclass(frozen=True, slots=True)
class Touch:
    """Any other write to live memory.

    Attributes:
        storage: identity of the storage.
        piece: the memory it covers (its source side means nothing); None: take it as the whole storage.
        order: position among all writes.
        what: the operation.
    """

    storage: int
    piece: Piece | None
    order: int
    what: str


@dataclass(slots=True)
class Notes:
    """What the observer saw.

    Attributes:
        landings: copies from checkpoint tensors, in order.
        touches: other writes to live memory, in order.
        spoiled: by feed, why it cannot be routed; the first reason.
        used: feeds that took part in more than views.
    """

    landings: list[Landing] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    spoiled: dict[int, str] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def spoil(self, feeds: Iterable[int], reason: str) -> None:
        """Remember why feeds cannot be routed."""
        for feed in feeds:
            self.spoiled.setdefault(feed, reason)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """See the module. Enter it around `load_weights`, on the thread that runs it."""

    def __init__(self, tracker: Tracker, memory: LiveMemory, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = tracker
        self._memory = memory
        self._notes = notes
        self._fresh: set[int] = set()  # storages made since: free to be written
        self._order = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, rewrite or skip one operation."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = _written(func, args, kwargs)
        if written:
            return self._write(func, args, kwargs, inputs, written)
        feeds = self._tracker.feeds(inputs)
        if feeds and func in _COPIES:
            return self._copy(func, args, kwargs)
        result = func(*args, **kwargs)
        self._follow(func, inputs, result, feeds)
        return result

    def _follow(self, func: Any, inputs: Sequence[torch.Tensor], result: Any, feeds: frozenset[int]) -> None:
        """Note what the outputs of an operation that writes nothing are."""
        before = {storage_id(tensor) for tensor in inputs}
        is_view = True
        for output in tree_leaves(result):
            if isinstance(output, torch.Tensor) and storage_id(output) not in before:
                is_view = False
                self._fresh.add(storage_id(output))
                if feeds:
                    self._tracker.stain(output, feeds, f"its loader computes {func} from it")
        if not is_view:
            self._notes.used |= feeds

    def _copy(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A copy of a checkpoint tensor, to any device: stays a meta tensor, with known contents."""
        source: torch.Tensor = args[0]
        feeds = self._tracker.feeds([source])
        self._notes.used |= feeds
        dtype = kwargs.get("dtype") or source.dtype
        layout = kwargs.get("memory_format") or torch.preserve_format
        copy = torch.empty_like(source, dtype=dtype, device="meta", memory_format=layout)
        if storage_id(source) not in self._tracker.origins:
            self._tracker.stain(copy, feeds, self._tracker.stained[storage_id(source)][1])
        elif dtype != source.dtype:
            self._tracker.stain(copy, feeds, f"its loader converts it from {source.dtype} to {dtype}")
        elif not is_dense(copy.shape, copy.stride()):
            self._tracker.stain(copy, feeds, f"its loader copies it with gaps ({func})")
        else:
            self._tracker.copied(source, copy)
        return copy

    def _write(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> Any:
        feeds = self._tracker.feeds(inputs)
        self._notes.used |= feeds
        self._order += 1
        ours = self._tracker.feeds(written)
        if ours:  # gpt-oss zeroes a bias on the ranks that must not add it
            self._notes.spoil(ours, f"its loader changes the checkpoint tensor itself ({func})")
            return _answer(func, written)
        if all(storage_id(tensor) in self._fresh for tensor in written):
            if not feeds:
                return func(*args, **kwargs)
            for tensor in written:
                self._tracker.stain(tensor, feeds, f"its loader collects it in a buffer ({func})")
            return _answer(func, written)
        for tensor in written:
            if storage_id(tensor) in self._fresh:
                continue
            if func is _aten.copy_.default and storage_id(args[1]) in self._tracker.origins:
                self._land(args[1], tensor)
            else:
                self._touch(func, tensor, feeds)
        return _answer(func, written)

    def _land(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target.copy_(source)``, from a checkpoint tensor into live memory."""
        feed = self._tracker.origins[storage_id(source)].feed
        source = source.expand(target.shape)  # raises what the copy would raise
        if not target.numel():
            return
        try:
            piece = self._piece(source, target)
        except NotAffine as error:
            self._notes.spoil([feed], str(error))
            self._touch(_aten.copy_.default, target, frozenset())
            return
        self._notes.landings.append(Landing(feed, storage_id(target), piece, self._order))

    def _piece(self, source: torch.Tensor, target: torch.Tensor) -> Piece:
        if storage_id(target) not in self._memory.storages:
            raise NotAffine("it lands in memory that is no parameter or buffer of the model")
        width = self._memory.storages[storage_id(target)].itemsize
        if target.element_size() != width:
            raise NotAffine(f"it lands in memory that another parameter uses as elements of {width} bytes")
        if source.dtype != target.dtype:
            raise NotAffine(f"the engine keeps it as {target.dtype}, the checkpoint holds {source.dtype}")
        return self._tracker.piece(source, target)

    def _touch(self, func: Any, target: torch.Tensor, feeds: frozenset[int]) -> None:
        """Any other write into live memory."""
        for feed in feeds:
            reason = next(
                (what for among, what in self._tracker.stained.values() if feed in among),
                f"its loader writes it with {func}",
            )
            self._notes.spoil([feed], reason)
        if not target.numel():
            return
        try:
            dims = [(n, stride, stride) for n, stride in zip(target.shape, target.stride(), strict=True)]
            start = int(target.storage_offset())
            piece = make_piece(start, start, dims)
        except NotAffine:
            piece = None
        self._notes.touches.append(Touch(storage_id(target), piece, self._order, str(func)))


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that an operation writes to, by its schema."""
    found: list[torch.Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _answer(func: Any, written: list[torch.Tensor]) -> Any:
    """What a skipped operation returns: the tensors it would have written."""
    returns = len(func._schema.returns)
    if returns == 0:
        return None
    if returns == 1:
        return written[0]
    if returns == len(written):
        return tuple(written)
    raise RuntimeError(f"{func} writes to live memory and returns something the probe cannot make up")
