"""The small operations on bits, and the fast pass against the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.capture import arrays

PAIRS = st.dictionaries(st.integers(0, 30), st.integers(-9, 9), max_size=12)


def _sparse(pairs):
    index = torch.tensor(sorted(pairs), dtype=torch.int32)
    return index, torch.tensor([pairs[int(i)] for i in index], dtype=torch.int16)


@given(first=PAIRS, second=PAIRS)
def test_merge_keeps_the_first_value(first, second):
    """F03: the bits before the first of several changes are the ones to compare with."""
    index, old = arrays.merge_first_wins(_sparse(first), _sparse(second))
    assert dict(zip(index.tolist(), old.tolist(), strict=True)) == {**second, **first}
    assert index.tolist() == sorted(index.tolist())


@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=40), flips=st.lists(st.integers(0, 39), max_size=5))
def test_masters_are_compared_as_if_cast(bits, flips):
    """The pass without the cast gives what torch's cast gives: NaN, infinities, subnormals, ties."""
    masters = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)
    truth = arrays.to_bits(masters, torch.bfloat16)
    before = truth.clone()
    for flip in flips:
        if flip < len(bits):
            before[flip] ^= 1
    found = arrays.compare_masters(before, masters)
    if found is None:
        pytest.skip("this machine's cast keeps NaN payloads")
    plain = arrays.compare(before, truth)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_bits_are_compared_not_values():
    """F19."""
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    index, bits = arrays.compare(arrays.to_bits(old, torch.float32), arrays.to_bits(new, torch.float32))
    assert (index.tolist(), bits.tolist()) == ([0], [-(2**31)])


@pytest.mark.parametrize("way", [arrays.fingerprint, arrays._fingerprint_by_words])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_fingerprints_see_position(way, dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-100 if dtype.is_signed else 0, 100, (70_003,), generator=generator).to(dtype)
    reference = way(bits)
    assert torch.equal(way(bits.clone()), reference)

    def differs(changed):
        return not torch.equal(way(changed), reference) or torch.equal(changed, bits)

    for first, second in [(0, 1), (5, 40_000), (70_001, 70_002), (1, 16_385)]:
        swapped = bits.clone()
        swapped[first], swapped[second] = bits[second].clone(), bits[first].clone()
        assert differs(swapped)
    assert differs(torch.roll(bits, 1))
    assert differs(bits.flip(0))
    assert differs(torch.zeros_like(bits))
    signs = bits.clone()
    top = 8 * bits.element_size() - 1
    flip = torch.tensor(1 << top if dtype == torch.uint8 else -(1 << top), dtype=dtype)
    signs[7] ^= flip
    signs[7 + 8 // bits.element_size() * 3] ^= flip
    assert differs(signs)
