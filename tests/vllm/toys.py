"""Small modules with the loaders of the wild, for the probe: no vLLM needed.

`Toy` holds one parameter (and what a loader may want beside it); its `load_weights` gives the checkpoint tensor "w" to
the loader under test. What a real load leaves in the parameter is the oracle.
"""

from __future__ import annotations

import numpy as np
import torch

from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.receive.patches import Patch, PatchSlice

SPELLING = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8", torch.float64: "F64"}


class Toy(torch.nn.Module):
    def __init__(self, loader, shape, dtype=torch.bfloat16, extra=()):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.loader = loader
        for name, value in extra:
            setattr(self, name, value)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loader(self, name, tensor)


def random_bits(shape, dtype=torch.bfloat16, seed=0):
    """A tensor of random bits: NaNs with payloads, -0.0, infinities and subnormals are all likely."""
    generator = np.random.default_rng(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    bits = generator.integers(0, 256, int(np.prod(shape, dtype=np.int64)) * width, np.uint8)
    return torch.from_numpy(bits.view(f"<i{width}")).view(dtype).reshape(shape)


def bits_of(tensor):
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    array = tensor.detach().cpu().contiguous().view(signed).numpy()
    return array.view(f"<u{array.dtype.itemsize}")


def schema_of(tensors, aliases=()):
    specs = [TensorSpec(name, SPELLING[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    specs += [TensorSpec(name, SPELLING[tensors[of].dtype], tuple(tensors[of].shape), of) for name, of in aliases]
    return Schema(tuple(sorted(specs, key=lambda spec: spec.name)))


def patch_of(version, schema, before, after):
    """What turns one state into the next, by comparing bits."""
    slices = {}
    for name in before:
        old, new = bits_of(before[name]).reshape(-1), bits_of(after[name]).reshape(-1)
        where = np.flatnonzero(old != new)
        if where.size:
            slices[schema.index(name)] = (PatchSlice(_box(schema, name), where.astype(np.uint32), new[where]),)
    return make_patch(version, slices)


def dense_patch(version, schema, after):
    slices = {
        schema.index(name): (PatchSlice(_box(schema, name), None, bits_of(tensor).reshape(-1)),)
        for name, tensor in after.items()
    }
    return make_patch(version, slices)


def make_patch(version, slices):
    return Patch(version, sum(one.value.size for of_tensor in slices.values() for one in of_tensor), slices, {})


def _box(schema, name):
    from torch_delta.format.box import Box

    return Box.whole(schema.by_name[name].shape)


def changed(tensor, fraction, seed):
    """A copy of which about `fraction` of the elements have other bits."""
    generator = np.random.default_rng(seed)
    other = random_bits(tensor.shape, tensor.dtype, seed + 1000)
    mask = torch.from_numpy(generator.random(tensor.numel()) < fraction).reshape(tensor.shape)
    return torch.where(mask, other, tensor)
