"""Compare two folders of safetensors files byte for byte; shares no code with what it judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import deserialize

if TYPE_CHECKING:
    from pathlib import Path


def differences(left: Path, right: Path) -> tuple[list[str], int]:
    """What differs between the tensors of two folders.

    Returns:
        One line per tensor that is missing on a side or differs in dtype, shape or any byte; and the bytes compared.
    """
    ours, theirs = _tensors(left), _tensors(right)
    found = [f"{name}: only in {left}" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"{name}: only in {right}" for name in sorted(theirs.keys() - ours.keys())]
    num_bytes = 0
    for name in sorted(ours.keys() & theirs.keys()):
        (dtype, shape, data), (other_dtype, other_shape, other_data) = ours[name], theirs[name]
        num_bytes += len(data)
        if (dtype, shape) != (other_dtype, other_shape):
            found.append(f"{name}: {dtype} {shape} against {other_dtype} {other_shape}")
        elif data != other_data:
            num_wrong = sum(a != b for a, b in zip(data, other_data, strict=True))
            found.append(f"{name}: {num_wrong} of {len(data)} bytes differ")
    return found, num_bytes


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of every weight file in `folder`, as it lies on disk."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return tensors
