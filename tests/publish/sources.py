"""A change source over numpy arrays: every state is a full copy, so that it is obviously right."""

from __future__ import annotations

import json

import numpy as np

from torch_delta.capture.source import Collected, OwnedBox, Region
from torch_delta.codec.change import Change
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO, digest_words
from torch_delta.format.schema import Schema, TensorSpec

SPECS = {"a.weight": ("BF16", (10, 6)), "b.bias": ("F32", (7,)), "c.scale": ("BF16", ()), "d.none": ("BF16", (0, 4))}
SCHEMA = Schema(tuple(TensorSpec(name, dtype, shape) for name, (dtype, shape) in sorted(SPECS.items())))
WIDTH = {"BF16": 2, "F32": 4}


def initial(seed: int = 0) -> dict[str, np.ndarray]:
    """Bits of every tensor; the same for the same seed."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 1 << 8 * WIDTH[dtype], shape, dtype=np.uint64).astype(f"<u{WIDTH[dtype]}")
        for name, (dtype, shape) in SPECS.items()
    }


def rows(rank: int, world: int) -> list[tuple[str, Box]]:
    """Rank's boxes: uneven rows of the matrix, the rest on the last rank."""
    cut = [10 * r // world for r in range(world + 1)]  # 0, 3, 6, 10 for three ranks
    mine = [("a.weight", Box((cut[rank], 0), (cut[rank + 1] - cut[rank], 6)))]
    if rank == world - 1:
        mine += [("b.bias", Box((0,), (7,))), ("c.scale", Box((), ()))]
    return mine


class ArraySource:
    """A `ChangeSource`: `live` is edited by the test, directly."""

    def __init__(self, state=None, owned=None, schema=SCHEMA):
        self.schema = schema
        self.live = initial() if state is None else {name: bits.copy() for name, bits in state.items()}
        self.owned = tuple(
            OwnedBox(tensor=schema.index(name), box=box) for name, box in (rows(0, 1) if owned is None else owned)
        )
        self._seen = self._copy()
        self._before = {}
        self._token = 0
        self.wants_ranks = True
        self.calls = []

    def collect(self):
        self._token += 1
        changes = []
        for item in self.owned:
            name, at = self.schema.tensors[item.tensor].name, slices(item.box)
            old, new = self._seen[name][at].reshape(-1), self.live[name][at].reshape(-1)
            index = np.flatnonzero(old != new)
            if index.size:
                changes.append(
                    Change(
                        tensor=item.tensor,
                        box=item.box,
                        index=index.astype(np.uint32),
                        old=old[index].copy(),
                        new=new[index].copy(),
                    )
                )
        self._before[self._token] = self._seen
        self._seen = self._copy()
        self.calls.append(("collect", self._token))
        return Collected(token=self._token, changes=tuple(changes), num_changed=sum(change.count for change in changes))

    def commit(self, token):
        assert token == min(self._before), "tokens commit oldest first"
        del self._before[token]
        self.calls.append(("commit", token))

    def rollback(self, token):
        self._seen = self._before[token]
        for later in [t for t in self._before if t >= token]:
            del self._before[later]
        self.calls.append(("rollback", token))

    def regions(self):
        for item in self.owned:
            yield Region(tensor=item.tensor, box=item.box, bits=self.read(item.tensor, item.box))

    def read(self, tensor, box):
        return np.ascontiguousarray(self._seen[self.schema.tensors[tensor].name][slices(box)])

    def digests(self):
        total = {}
        for item in self.owned:
            spec = self.schema.tensors[item.tensor]
            flat = self._seen[spec.name].reshape(-1)
            digest = total.get(item.tensor, ZERO)
            for start, _, length in item.box.runs(spec.shape):
                digest = digest + digest_words((int(word) for word in flat[start : start + length]), start)
            total[item.tensor] = digest
        return total

    def close(self):
        self.calls.append(("close", 0))

    def _copy(self):
        return {name: bits.copy() for name, bits in self.live.items()}


class SteppedSource(ArraySource):
    """A `StepSource`: `step` stands for `optimizer.step()`."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._listeners = []
        self.num_steps = 0

    def on_step(self, listener):
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def step(self):
        self.num_steps += 1
        for listener in list(self._listeners):
            listener(self.num_steps)


def edit(source, seed):
    """Change a few elements of every owned box, the same way for the same seed whatever the ranks own."""
    rng = np.random.default_rng(seed)
    for name in sorted(SPECS):
        bits = source.live[name].reshape(-1)
        if bits.size:
            where = rng.integers(0, bits.size, 3)
            bits[where] ^= rng.integers(1, 1 << 15, 3, dtype=np.uint64).astype(bits.dtype)


def flip(source, seed):
    """Change every element, so that every rank has a part."""
    for bits in source.live.values():
        bits[...] ^= 1 << seed % 8


def edited(seeds, change=edit):
    """The state after these edits of the initial one."""
    source = ArraySource()
    for seed in seeds:
        change(source, seed)
    return source.live


def same(left, right):
    return left.keys() == right.keys() and all(
        np.array_equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def write_checkpoint(path, state, *, config=None, files=1):
    """A checkpoint folder with these bits, in one file or several with an index."""
    path.mkdir(parents=True)
    names = sorted(state)
    groups = [names[i::files] for i in range(files)]
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        header, at, body = {}, 0, b""
        for name in group:
            data = state[name].tobytes()
            header[name] = {
                "dtype": SPECS[name][0],
                "shape": list(state[name].shape),
                "data_offsets": [at, at + len(data)],
            }
            at += len(data)
            body += data
        text = json.dumps(header).encode()
        file = "model.safetensors" if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text + body)
        weight_map.update(dict.fromkeys(group, file))
    if files > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config or {"model_type": "none"}))
    (path / "tokenizer.json").write_text("{}")
    return path
