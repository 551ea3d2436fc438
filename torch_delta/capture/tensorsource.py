"""A walk over (name, full tensor) pairs as a source of changes: for frameworks that already gather their weights.

Each rank keeps a copy of its share of the tensors and compares it whenever it walks. A share is whole tensors, balanced
by bytes among the ranks that can walk; the others own nothing and only keep their place in the exchange at
construction. A walk may be collective (gathering tensor by tensor): every walking rank always walks to the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_delta.capture import arrays
from torch_delta.capture.crew import Aside
from torch_delta.capture.history import Persistent
from torch_delta.capture.ledger import Ledger
from torch_delta.capture.ownership import Claim, exchange, least_loaded
from torch_delta.capture.placement import Placement
from torch_delta.capture.regions import Piece, row_major
from torch_delta.capture.resolve import refuse_quantised, some
from torch_delta.capture.sweep import sweep
from torch_delta.errors import CaptureError
from torch_delta.format.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from torch_delta.capture.source import Bits, Collected, OwnedBox, Region
    from torch_delta.capture.sweep import Found
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema, TensorSpec

Walk = Iterable[tuple[str, torch.Tensor]]


class TensorSource:
    """Changes of full tensors that somebody else produces. A `ChangeSource`.

    Collective at construction only (two object gathers), besides what the walk itself does.

    Args:
        tensors: yields (checkpoint name, full tensor) when iterated or called; every walk starts anew and yields every
            tensor of the schema that is not an alias, once, in any order; more names are refused. None on ranks that
            cannot walk.
        schema: names, shapes and serving dtypes, the same on every rank; tensors are cast to them.
        placement: where the copies live; `device` means the host, since the walked tensors come and go.
        process_group: ranks that publish together; None: all.

    Raises:
        CaptureError: the walk and the schema do not agree, no rank can walk, or the schema is quantised; all ranks
            raise.
    """

    def __init__(
        self,
        tensors: Walk | Callable[[], Walk] | None,
        schema: Schema,
        *,
        placement: Placement | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._schema = schema
        self._tensors = tensors
        kept = placement if placement is not None and placement.kind != "device" else Placement(kind="cpu")
        rank, claims = exchange(self._claim(), process_group)
        walkers = [number for number, claim in enumerate(claims) if claim.walks]
        if not walkers:
            raise CaptureError("no rank can walk over the tensors; at least one needs them")
        sizes = {index: schema.tensors[index].nbytes for index in schema.data_indices if schema.tensors[index].numel}
        shares = least_loaded([(size, index, walkers) for index, size in sizes.items()], len(claims))
        self._units = {schema.tensors[index].name: _Whole(index, schema.tensors[index]) for index in shares[rank]}
        self._numbers = {name: number for number, name in enumerate(self._units)}
        keepers, cause = self._first_walk(kept)
        exchange(Claim() if cause is None else Claim.refusal(cause), process_group, cause=cause)
        self._ledger = Ledger(schema, tuple(self._units.values()), [keepers[name] for name in self._units])

    @property
    def schema(self) -> Schema:
        """The checkpoint tensors, the same on every rank."""
        return self._schema

    @property
    def owned(self) -> Sequence[OwnedBox]:
        """This rank's tensors, whole, ascending; fixed after construction."""
        return self._ledger.owned

    @property
    def wants_ranks(self) -> bool:
        """Whether a collect also reduces changes for `packed`, profile small; set between collects. Default: True."""
        return self._ledger.wants_ranks

    @wants_ranks.setter
    def wants_ranks(self, wanted: bool) -> None:
        self._ledger.wants_ranks = wanted

    @torch.no_grad()
    def collect(self) -> Collected:
        """Walk, and take everything that changed since the last collect."""
        started = time.perf_counter()
        with self._ledger.lock:
            self._ledger.begin()
            filing = Aside(self._ledger.file)  # from our copies: the walk goes on meanwhile
            try:
                for unit in self._walk():
                    found = self._ledger.find(self._numbers[unit.name])
                    unit.release()
                    if found is not None:
                        filing.add(found, self._ledger.num_read(found))
                filing.finish()
            except BaseException:
                filing.stop()
                self._ledger.abandon()
                raise
            return self._ledger.finish(seconds=time.perf_counter() - started, info={"mode": "tensors"})

    def commit(self, token: int) -> None:
        """The version of `token` exists. Any thread."""
        self._ledger.commit(token)

    def rollback(self, token: int) -> None:
        """The version of `token` does not exist; the next collect covers it and all later ones. Any thread."""
        self._ledger.rollback(token)

    def regions(self) -> Iterator[Region]:
        """Bits of every owned tensor as of the last collect, in `owned` order. Does not walk."""
        return self._ledger.regions()

    def read(self, tensor: int, box: Box) -> Bits:
        """Bits of a box of an owned tensor, as of the last collect. Does not walk."""
        return self._ledger.read(tensor, box)

    def digests(self) -> dict[int, Digest]:
        """By schema index: digest of this rank's tensors as of the last collect."""
        return self._ledger.digests()

    def close(self) -> None:
        """Free the copies. Idempotent."""
        self._tensors = None
        self._ledger.close()

    def _claim(self) -> Claim:
        try:
            refuse_quantised(self._schema)
            self._refuse_arguments()
        except CaptureError as error:
            return Claim.refusal(error)
        return Claim(walks=self._tensors is not None)

    def _refuse_arguments(self) -> None:
        unknown = [spec.name for spec in self._schema.tensors if spec.dtype not in arrays.SERVING_DTYPES]
        if unknown:
            raise CaptureError(f"no torch dtype for {some(unknown)}", tensors=tuple(unknown))
        if isinstance(self._tensors, Iterator):
            raise CaptureError(
                "tensors is an iterator, which can be walked only once; pass a function that starts a new walk"
            )

    def _first_walk(self, kept: Placement) -> tuple[dict[str, Persistent], Exception | None]:
        """Copies of this rank's tensors, and what went wrong, if anything, for the other ranks to hear."""
        keepers: dict[str, Persistent] = {}
        try:
            for unit in self._walk():
                keepers[unit.name] = Persistent(unit, kept)
                unit.release()
        except Exception as error:
            return {}, error
        return keepers, None

    def _walk(self) -> Iterator[_Whole]:
        """Owned units, holding their tensor while yielded. Always walks to the end; then complains, if at all."""
        if self._tensors is None:
            return
        expected = {self._schema.tensors[index].name for index in self._schema.data_indices}
        aliases = {spec.name for spec in self._schema.tensors if spec.alias_of is not None}
        seen: set[str] = set()
        complaint = ""
        for name, tensor in self._tensors() if callable(self._tensors) else self._tensors:
            if name in aliases:
                continue
            spec = self._schema.by_name.get(name)
            complaint = complaint or _disagreement(name, tensor, spec, seen)
            seen.add(name)
            if name in self._units and not complaint:
                unit = self._units[name]
                unit.hold(tensor)
                yield unit
        missing = sorted(expected - seen)
        if missing and not complaint:
            complaint = f"the walk did not yield {some(missing)}"
        if complaint:
            raise CaptureError(complaint, tensors=tuple(missing))


class _Whole:
    """A full tensor as a unit: one piece, its bits only at hand during a walk."""

    def __init__(self, index: int, spec: TensorSpec) -> None:
        self.name = spec.name
        self.pieces = (Piece(index, Box.whole(spec.shape), 0, row_major(spec.shape)),)
        self.starts = np.array([0, spec.numel], dtype=np.int64)
        self.serving = arrays.SERVING_DTYPES[spec.dtype]
        self.itemsize = spec.nbytes // spec.numel
        self._bits: torch.Tensor | None = None

    def hold(self, tensor: torch.Tensor) -> None:
        """Take up the tensor of this walk."""
        self._bits = arrays.to_bits(tensor.detach().reshape(-1), self.serving)

    def release(self) -> None:
        """Let it go."""
        self._bits = None

    def current(self) -> torch.Tensor:
        """Its bits."""
        assert self._bits is not None
        return self._bits

    def sweep(self, before: torch.Tensor) -> Found:
        """What differs between a copy of its bits and its bits now; the copy becomes the bits now."""
        return sweep(before, self.current())


def _disagreement(name: str, tensor: torch.Tensor, spec: TensorSpec | None, seen: set[str]) -> str:
    """What is wrong with one pair of the walk, or nothing."""
    if spec is None:
        return f"the walk yields {name!r}, which is not in the schema; its changes would reach nobody"
    if name in seen:
        return f"the walk yields {name!r} twice"
    if tuple(tensor.shape) != tuple(spec.shape):
        return f"{name}: the walk yields shape {tuple(tensor.shape)}, the schema has {tuple(spec.shape)}"
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return f"{name}: the walk yields a {type(tensor).__name__}; full, ordinary tensors are needed"
    serving: Any = arrays.SERVING_DTYPES.get(spec.dtype)
    if serving is None or not arrays.can_cast(tensor.dtype, serving):
        return f"{name}: {tensor.dtype} cannot be served as {spec.dtype}"
    return ""
