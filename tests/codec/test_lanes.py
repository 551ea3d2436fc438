"""Masks of 64 elements against numpy, element by element: every width, any place in memory."""

from __future__ import annotations

import numpy as np
import pytest

from torch_delta.codec import lanes

numba = pytest.importorskip("numba")

WIDTHS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def functions():
    differ, planes = lanes.differing(numba), lanes.class_planes(numba)
    count, lowest = lanes.popcount(numba), lanes.lowest(numba)
    return (
        numba.njit(lambda left, right, at: differ(left, right, at)),  # noqa: PLW0108 - called by compiled code only
        numba.njit(lambda array, at, magnitude, shift, boundary: planes(array, at, magnitude, shift, boundary)),  # noqa: PLW0108
        numba.njit(lambda word: (count(word), lowest(word))),
    )


def bits_of(word: int) -> list[int]:
    return [int(word) >> place & 1 for place in range(lanes.LANES)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset_bytes", [0, 1, 3])
def test_elements_that_differ(functions, width: int, offset_bytes: int) -> None:
    rng = np.random.default_rng(width)
    raw = rng.integers(0, 256, 200 * width + offset_bytes, dtype=np.uint8)
    left = raw[offset_bytes:].view(f"<u{width}")
    right = left.copy()
    right[rng.random(200) < 0.3] ^= left.dtype.type(1 << (8 * width - 1))
    for at in (0, 5, 136):
        expected = [int(a != b) for a, b in zip(left[at : at + 64].tolist(), right[at : at + 64].tolist(), strict=True)]
        assert 0 < sum(expected) < 64
        assert bits_of(functions[0](left, right, at)) == expected


@pytest.mark.parametrize(
    ("width", "shift", "magnitude", "boundary"),
    [(1, 2, 0x7F, 3), (1, 0, 0xFF, 120), (2, 7, 0x7FFF, 110), (4, 23, 0x7FFFFFFF, 0), (8, 52, (1 << 63) - 1, 1000)],
)
def test_classes(functions, width: int, shift: int, magnitude: int, boundary: int) -> None:
    rng = np.random.default_rng(shift)
    num_exponents = (magnitude >> shift) + 1
    exponents = np.clip(boundary + rng.integers(-3, 12, 100), 0, num_exponents - 1)
    values = [
        int(exponent) << shift | int(rng.integers(0, 1 << min(shift, 20))) | sign << (8 * width - 1)
        for exponent, sign in zip(exponents, rng.integers(0, 2, 100).tolist(), strict=True)
    ]
    kind = np.dtype(f"<u{width}").type
    array = np.array([value & ((1 << 8 * width) - 1) for value in values], kind)
    found = functions[1](array, 20, kind(magnitude), kind(shift), kind(boundary))
    expected = [min(max(((int(bits) & magnitude) >> shift) - boundary, 0), 7) for bits in array[20:84]]
    assert [sum(plane[at] << place for place, plane in enumerate(map(bits_of, found))) for at in range(64)] == expected


def test_counting_and_finding_bits(functions) -> None:
    for word in (1, 1 << 63, 0xF0F0, (1 << 64) - 1):
        assert functions[2](np.uint64(word)) == (word.bit_count(), (word & -word).bit_length() - 1)
    assert functions[2](np.uint64(0)) == (0, 64)
