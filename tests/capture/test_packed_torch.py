"""Reducing in torch operations gives what the codec's reference gives, bit for bit, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.capture.packed_torch import reduce_on_device
from torch_delta.codec.diff import diff
from torch_delta.codec.packed import pieces
from torch_delta.codec.packed.reduced import reduce_change
from torch_delta.format.box import Box
from torch_delta.format.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from torch_delta.codec.packed.reduced import Reduced

SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def pair(rng: np.random.Generator, numel: int, dtype: str, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights, or any bits for dtypes that numpy lacks, and a copy with small and large changes."""
    width = ITEMSIZE[dtype]
    values = rng.normal(0, 0.02, numel).astype(np.float32)
    if dtype == "BF16":
        old = (values.view(np.uint32) >> 16).astype(np.uint16)
    elif dtype == "F32":
        old = values.view(np.uint32)
    else:
        old = rng.integers(0, 256, (numel, width), dtype=np.uint8).view(f"<u{width}").reshape(-1)
    noise = rng.integers(0, 256, (numel, width), dtype=np.uint8).view(f"<u{width}").reshape(-1)
    new = np.where(rng.random(numel) < share, old + old.dtype.type(1), old)
    return old, np.where(rng.random(numel) < share / 10, noise, new)


def both(
    dtype: str, box: Box, old: np.ndarray, new: np.ndarray, device: str, *, is_after: bool
) -> tuple[tuple[Reduced, ...], tuple[Reduced, ...]]:
    index = diff(old, new)
    before, after, region = old[index], new[index], new if is_after else old
    expected = reduce_change(dtype, box, index, before, after, region)
    kind = SIGNED[old.itemsize]
    bits = [torch.from_numpy(array.view(kind)).to(device) for array in (before, after, region)]
    positions = torch.from_numpy(index.astype(np.int64)).to(device)
    return expected, reduce_on_device(dtype, box, positions, *bits)


def check(expected: tuple[Reduced, ...], found: tuple[Reduced, ...]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.start, one.boundary) == (other.start, other.boundary)
        for name in ("counts", "populations", "gaps", "steps"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert mine.dtype == theirs.dtype
            assert mine.tolist() == theirs.tolist(), name


@given(
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    numel=st.sampled_from([1, 63, 64, 65, 700, 5000]),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 999),
    is_after=st.booleans(),
)
def test_equal_to_the_reference(dtype: str, numel: int, share: float, seed: int, is_after: bool) -> None:
    old, new = pair(np.random.default_rng(seed), numel, dtype, share)
    check(*both(dtype, Box((3,), (numel,)), old, new, "cpu", is_after=is_after))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_boxes_of_several_pieces(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_FRAME_RAW_BYTES", 1000)
    old, new = pair(np.random.default_rng(0), 12_000, dtype, 0.05)
    new[2000:5000] = old[2000:5000]  # pieces without changes
    expected, found = both(dtype, Box((0, 0), (100, 120)), old, new, "cpu", is_after=True)
    assert len(expected) > 5
    check(expected, found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_equal_on_a_gpu(dtype: str, share: float) -> None:
    old, new = pair(np.random.default_rng(0), 6_000_000, dtype, share)
    check(*both(dtype, Box((0, 0), (3000, 2000)), old, new, "cuda", is_after=True))
