"""Stand-ins for what only vLLM has, so that the state machine is tested without it: a model, and ranks in threads.

`Toy` holds checkpoint tensors, or this rank's rows of them, in numpy arrays. It does what `routing` and vLLM's loaders
do, in the plainest way, and can be told to fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.vllm.tiny import read_checkpoint, write_weights
from torch_delta.codec.digest import digest_delta, digest_run
from torch_delta.errors import ApplyFailed
from torch_delta.format.digest import ZERO
from torch_delta.vllm.routing.plan import PlanSummary

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


def write_toy_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """A checkpoint of a few small tensors in two layers; no model can be built from it."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embed.weight": (16, 8),
        "layers.0.proj.weight": (8, 12),
        "layers.0.scale": (8,),
        "layers.1.proj.weight": (8, 12),
        "layers.1.scale": (8,),
    }
    state = {name: rng.integers(0, 1 << 16, shape).astype(np.uint16) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    write_weights(folder, state, dict.fromkeys(state, "BF16"))
    return folder


class ToyPlan:
    def __init__(self, version: int, writes: dict[int, tuple[Any, Any, Any]], unrouted: frozenset[int], epoch: int):
        self.version = version
        self.writes = writes  # tensor -> (flat indices, old bits, new bits), of the rows of this rank
        self.unrouted = unrouted
        self.epoch = epoch
        self.num_elements = sum(index.size for index, _, _ in writes.values())
        self.nbytes = 0
        self.summary: Any = None


class ToyLive:
    """What `routing.LiveModel` is for the state machine."""

    def __init__(self, toy: Toy, schema: Any) -> None:
        self.toy = toy
        self.schema = schema
        self.reach = (toy.rank, toy.size)
        self.unrouted = {i: reason for i in schema.data_indices if (reason := toy.unroutable.get(self.name(i)))}
        self.routed = frozenset(schema.data_indices) - self.unrouted.keys()
        self.epoch = 0
        self.num_ranks = 0
        toy.num_open += 1

    def name(self, index: int) -> str:
        return self.schema.tensors[index].name

    def settle(self, reaches: Sequence[Any], rank: int) -> None:
        assert [r for r, _ in reaches] == list(range(len(reaches)))
        assert rank == self.toy.rank
        self.num_ranks = len(reaches)

    def withdraw(self, reasons: dict[int, str]) -> None:
        self.unrouted.update(reasons)
        self.routed -= reasons.keys()

    def prove(self, read: Callable[..., Any], *, cancelled: Callable[[], bool]) -> dict[int, str]:
        from torch_delta.format.box import Box

        found = {}
        for index in sorted(self.routed):
            spec = self.schema.tensors[index]
            rows = self.toy.rows(spec.shape)
            wanted = np.asarray(read(index, Box((0,) * len(spec.shape), spec.shape))).reshape(spec.shape)[rows]
            if not np.array_equal(self.toy.values[spec.name], wanted):
                found[index] = "other bits"
        self.withdraw(found)
        return found

    def plan(self, patches: Sequence[Any], *, cancelled: Callable[[], bool]) -> ToyPlan:
        self.toy.happens("plan")
        wanted: dict[int, dict[int, int]] = {}
        for patch in patches:
            for tensor, slices in patch.items():
                shape = self.schema.tensors[tensor].shape
                flat = np.arange(int(np.prod(shape))).reshape(shape)
                for box, positions, value in slices:
                    inside = flat[
                        tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
                    ].reshape(-1)
                    where = inside if positions is None else inside[positions]
                    wanted.setdefault(tensor, {}).update(zip(where.tolist(), value.tolist(), strict=True))
        writes, sent, owned, deltas = {}, {}, {}, {}
        for tensor, elements in wanted.items():
            if tensor not in self.routed:
                continue
            mine = self.toy.mine(self.schema.tensors[tensor].shape)
            index = np.array(sorted(at for at in elements if at in mine), np.int64)
            new = np.array([elements[at] for at in index.tolist()], np.uint16)
            old = self.toy.full(self.name(tensor), self.schema.tensors[tensor].shape).reshape(-1)[index]
            writes[tensor] = (index, old, new)
            sent[tensor] = len(elements)
            owned[tensor] = index.size
            deltas[tensor] = digest_delta(index, old, new)
        version = patches[-1].version if patches else 0
        plan = ToyPlan(version, writes, frozenset(wanted) - self.routed, self.epoch)
        plan.summary = PlanSummary(version=version, sent=sent, owned=owned, deltas=deltas)
        return plan

    def write(self, plan: ToyPlan) -> ToyPlan:
        if plan.epoch != self.epoch:
            raise ApplyFailed("stale plan", undone=True)
        self.toy.happens("write")
        for tensor, (index, old, new) in plan.writes.items():
            flat = self.toy.full(self.name(tensor), self.schema.tensors[tensor].shape).reshape(-1)
            if not np.array_equal(flat[index], old):
                raise ApplyFailed("old bits differ", undone=True)
            flat[index] = new
            self.toy.keep(self.name(tensor), flat.reshape(self.schema.tensors[tensor].shape))
        self.epoch += 1
        return plan

    def rollback(self, undo: ToyPlan) -> None:
        self.toy.happens("rollback")
        for tensor, (index, old, _) in undo.writes.items():
            shape = self.schema.tensors[tensor].shape
            flat = self.toy.full(self.name(tensor), shape).reshape(-1)
            flat[index] = old
            self.toy.keep(self.name(tensor), flat.reshape(shape))
        self.epoch = undo.epoch

    def digest(self, tensors: Any = None, *, cancelled: Callable[[], bool]) -> Any:
        found = {}
        for index in self.routed:
            spec = self.schema.tensors[index]
            mine = sorted(self.toy.mine(spec.shape))
            values = self.toy.values[spec.name].reshape(-1)
            found[index] = digest_run(values, mine[0]) if mine else ZERO
        return found

    def forget(self) -> None:
        self.epoch += 1

    def close(self) -> None:
        self.toy.num_open -= 1


class Toy:
    """A model whose parameters are this rank's rows of every checkpoint tensor.

    Args:
        folder: loaded at the start.
        rank: of this one.
        size: how many share the rows.
        unroutable: by name, why a tensor has no route.
    """

    holds_served_files = True

    def __init__(self, folder: Path, *, rank: int = 0, size: int = 1, unroutable: dict[str, str] | None = None) -> None:
        self.rank, self.size = rank, size
        self.unroutable = dict(unroutable or {})
        self.values: dict[str, Any] = {}
        self.num_open = 0  # routed models that were not closed
        self.events: list[str] = []
        self.faults: dict[str, BaseException] = {}
        self.gates: dict[str, tuple[threading.Event, threading.Event]] = {}
        state, _ = read_checkpoint(folder)
        for name, bits in state.items():
            self.keep(name, bits)

    def rows(self, shape: tuple[int, ...]) -> slice:
        step = shape[0] // self.size
        return slice(self.rank * step, (self.rank + 1) * step)

    def mine(self, shape: tuple[int, ...]) -> set[int]:
        flat = np.arange(int(np.prod(shape))).reshape(shape)
        return set(flat[self.rows(shape)].reshape(-1).tolist())

    def full(self, name: str, shape: tuple[int, ...]) -> Any:
        full = np.zeros(shape, np.uint16)
        full[self.rows(shape)] = self.values[name]
        return full

    def keep(self, name: str, full: Any) -> None:
        self.values[name] = np.array(full[self.rows(full.shape)])

    def happens(self, event: str) -> None:
        """Note it; wait at its gate and fail if told to."""
        self.events.append(event)
        if event in self.gates:
            reached, go = self.gates.pop(event)
            reached.set()
            assert go.wait(30)
        if event in self.faults:
            raise self.faults.pop(event)

    def probe(self, schema: Any) -> ToyLive:
        self.happens("probe")
        return ToyLive(self, schema)

    def reload(self, tensors: Iterator[tuple[str, Any, str]]) -> None:
        self.happens("reload")
        for number, (name, bits, dtype) in enumerate(tensors):
            assert dtype == "BF16"
            if number == 1:
                self.happens("reload a tensor")
            self.keep(name, bits)

    def synchronize(self) -> None:
        self.events.append("synchronize")


class DictStore:
    """`torch.distributed.Store`, as far as it is used, for ranks that are threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        assert key not in self.values, f"{key} is used twice"
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None
