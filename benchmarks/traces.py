"""Old and new weights to publish: recorded training traces, or a synthetic pair where none are at hand.

A trace folder holds `<family>-base.safetensors.zst` (bf16 weights) and one `<family>-<...>.zst` per pair of optimizer
steps: a safetensors file with, per changed tensor, `old/<name>/idx|val` (base -> old) and `new/<name>/idx|val`
(old -> new), flat int positions and bf16 values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard
from safetensors.torch import load

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Weights before and after; same names, shapes and bf16 dtype on both sides.

    Attributes:
        name: which trace.
        old, new: tensor name -> bf16 tensor on the CPU, contiguous.
        num_changed: elements whose bits differ.
        num_elements: all elements.
    """

    name: str
    old: dict[str, torch.Tensor]
    new: dict[str, torch.Tensor]
    num_changed: int
    num_elements: int

    @property
    def density(self) -> float:
        """Changed elements as a share of all."""
        return self.num_changed / self.num_elements

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole model at bf16."""
        return 2 * self.num_elements


def names(folder: Path) -> list[str]:
    """The traces in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob("*.zst") if "-base." not in path.name)


def recorded(folder: Path, name: str) -> Pair:
    """Read the trace `name` of `folder`."""
    weights = load(_unpacked(folder / f"{name.split('-', 1)[0]}-base.safetensors.zst"))
    patch = load(_unpacked(folder / f"{name}.zst"))
    old = {key: _moved(value, patch, f"old/{key}") for key, value in weights.items()}
    new = {key: _moved(value, patch, f"new/{key}") for key, value in old.items()}
    return _pair(name, old, new)


def synthetic(*, num_layers: int = 2, width: int = 64, density: float = 0.01, seed: int = 0) -> Pair:
    """A tiny transformer-shaped pair in which `density` of the elements move by one unit in the last place."""
    random = np.random.default_rng(seed)
    shapes = {"embed.weight": (8 * width, width), "norm.weight": (width,)}
    for layer in range(num_layers):
        shapes |= {f"layers.{layer}.up.weight": (4 * width, width), f"layers.{layer}.down.weight": (width, 4 * width)}
    old, new = {}, {}
    for name, shape in shapes.items():
        values = torch.from_numpy(random.normal(0, 0.02, shape).astype(np.float32)).to(torch.bfloat16)
        bits = values.view(torch.int16).numpy().copy()
        bits[random.random(shape) < density] += 1
        old[name], new[name] = values, torch.from_numpy(bits).view(torch.bfloat16)
    return _pair("synthetic", old, new)


def _unpacked(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())


def _moved(tensor: torch.Tensor, patch: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    moved = tensor.clone()
    if f"{prefix}/idx" in patch:
        moved.view(torch.int16).view(-1)[patch[f"{prefix}/idx"].long()] = patch[f"{prefix}/val"].view(torch.int16)
    return moved


def _pair(name: str, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> Pair:
    changed = sum(int((old[key].view(torch.int16) != new[key].view(torch.int16)).sum()) for key in old)
    return Pair(name=name, old=old, new=new, num_changed=changed, num_elements=sum(t.numel() for t in new.values()))
