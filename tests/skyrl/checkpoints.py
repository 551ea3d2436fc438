"""Small checkpoints and their bits, written and read with safetensors and numpy alone."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

_WIDTHS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}


def write(folder: Path, tensors: dict[str, Any], *, tied: bool = False) -> Path:
    """Write torch tensors as a checkpoint folder, with a configuration that says whether the head is tied."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "tie_word_embeddings": tied}))
    return folder


def read_bits(folder: Path) -> dict[str, np.ndarray]:
    """Copies of the bits of every tensor of a checkpoint folder, flat and unsigned, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        for name, info in header.items():
            if name != "__metadata__":
                first, last = info["data_offsets"]
                raw = data[8 + length + first : 8 + length + last]
                found[name] = np.frombuffer(raw, dtype=_WIDTHS[info["dtype"]]).copy()
    return found


def bits_of(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    """Bits of torch tensors, by name."""
    import torch

    signed = {2: torch.int16, 4: torch.int32}
    return {
        name: tensor.detach()
        .contiguous()
        .reshape(-1)
        .view(signed[tensor.element_size()])
        .numpy()
        .copy()
        .view(f"<u{tensor.element_size()}")
        for name, tensor in tensors.items()
    }


def same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[str]:
    """Names of tensors that differ in any bit or are on one side only; empty when all is the same."""
    names = sorted(ours.keys() | theirs.keys())
    return [n for n in names if n not in ours or n not in theirs or not np.array_equal(ours[n], theirs[n])]
