"""Change detection against a plain Python loop, on both paths."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.oracle import random_bits, touch
from torch_delta.codec import diff as module
from torch_delta.codec.diff import diff, diff_bf16, nonzero
from torch_delta.codec.kernels import CHANGED, ROUND_BF16


@pytest.fixture(params=["numpy", "compiled"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for kernel in (*CHANGED.values(), ROUND_BF16):
        chosen = kernel.compile() if request.param == "compiled" else None
        assert chosen is not None or request.param == "numpy"
        monkeypatch.setattr(kernel, "get", lambda _, chosen=chosen: chosen)
    return request.param


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_equals_a_loop(path: str, width: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 100)
    rng = np.random.default_rng(width)
    for size in (0, 1, 7, 8, 9, 99, 100, 101, 333):
        old = random_bits(rng, (size,), width)
        new = touch(rng, old, share)
        expected = [i for i in range(size) if int(old[i]) != int(new[i])]
        found = diff(old, new)
        assert found.tolist() == expected
        assert found.dtype == np.uint32
        assert nonzero(old ^ new).tolist() == expected


@given(seed=st.integers(0, 999), size=st.integers(0, 600), share=st.floats(0, 1), width=st.sampled_from([1, 2, 4, 8]))
def test_compiled_equals_numpy(seed: int, size: int, share: float, width: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, (size,), width)
    new = touch(rng, old, share)
    kernel = CHANGED[width].compile()
    assert kernel is not None
    out = np.empty(size, np.int32)
    assert out[: kernel(old, new, out)].tolist() == module._changed_numpy(old, new).tolist()


def test_bits_not_values(path: str) -> None:  # F19: -0.0 differs from 0.0, a NaN equals itself
    values = np.array([0.0, np.nan, 1.0, -0.0, np.inf], np.float32).view(np.uint32)
    other = np.array([-0.0, np.nan, 1.0, -0.0, -np.inf], np.float32).view(np.uint32)
    assert diff(values, other).tolist() == [0, 4]


def test_strided_unaligned_and_scalar(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 50)
    rng = np.random.default_rng(0)
    old = random_bits(rng, (12, 9, 11), 2)
    new = touch(rng, old, 0.2)
    expected = np.flatnonzero(old != new).tolist()
    assert diff(old, new).tolist() == expected
    assert diff(np.asfortranarray(old), new).tolist() == expected
    transposed = np.flatnonzero((old != new).T).tolist()
    assert diff(old.T, new.T).tolist() == transposed
    window = (slice(1, 12, 3), slice(None), slice(2, 10, 2))
    assert diff(old[window], new[window]).tolist() == np.flatnonzero(old[window] != new[window]).tolist()
    unaligned = np.frombuffer(bytearray(1) + bytearray(new.tobytes()), "<u2", new.size, 1).reshape(new.shape)
    assert diff(old, unaligned).tolist() == expected
    assert diff(old[0, 0, 0].reshape(()), ~old[0, 0, 0].reshape(())).tolist() == [0]
    assert diff(old[:0].T, new[:0].T).tolist() == []


def test_read_only_input(path: str) -> None:
    old = np.frombuffer(bytes(16), np.uint16)
    assert diff(old, np.frombuffer(bytes(14) + b"\1\0", np.uint16)).tolist() == [7]


def test_bad_arguments() -> None:
    bits = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="both must be the same"):
        diff(bits, bits.astype(np.uint32))
    with pytest.raises(ValueError, match="both must be the same"):
        diff(bits, bits[:3])
    with pytest.raises(ValueError, match="must be bits"):
        diff(bits.view(np.int16), bits.view(np.int16))
    with pytest.raises(ValueError, match="uint32"):
        diff_bf16(bits, bits, nan_bits=0)


def round_by_hand(bits: int, nan_bits: int) -> int:
    """Nearest bf16, ties to the even one, by exact comparison of the distances."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return nan_bits
    low, up = bits >> 16, (bits >> 16) + 1
    below = bits - (low << 16)
    above = (up << 16) - bits
    if below != above:
        return low if below < above else up
    return low if low % 2 == 0 else up


EDGES = [0, 0x80000000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 1, 0x8000,
         0x18000, 0x28000, 0x18001, 0x17FFF, 0xFFFFFFFF]  # fmt: skip


@given(words=st.lists(st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(EDGES)), max_size=60), nan=st.booleans())
def test_bf16_masters(words: list[int], nan: bool) -> None:
    nan_bits = 0xFFFF if nan else 0x7FC0
    master = np.array(words, np.uint32)
    expected = [round_by_hand(word, nan_bits) for word in words]
    kernel = ROUND_BF16.compile()
    assert kernel is not None
    compiled, reference = np.empty((2, len(words)), np.uint16)
    kernel(master, nan_bits, compiled)
    module._round_bf16_numpy(master, nan_bits, reference)
    assert compiled.tolist() == reference.tolist() == expected


def test_bf16_masters_strided(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 16)
    master = np.arange(60, dtype=np.uint32).reshape(6, 10) << np.uint32(15)
    old = np.zeros((10, 6), np.uint16).T
    index, new = diff_bf16(master, old, nan_bits=0xFFFF)
    expected = [round_by_hand(int(word), 0xFFFF) for word in master.reshape(-1)]
    assert index.tolist() == [at for at, value in enumerate(expected) if value]
    assert new.tolist() == [value for value in expected if value]
    assert diff_bf16(master[:0], old[:0], nan_bits=0)[0].size == 0


def test_bf16_rounding_is_torchs(path: str) -> None:
    import torch

    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    words[: len(EDGES)] = EDGES
    floats = torch.from_numpy(words.view(np.float32).copy())
    expected = floats.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan_bits = int(torch.tensor([float("nan")] * 8).to(torch.bfloat16).view(torch.int16)[0]) & 0xFFFF
    index, new = diff_bf16(words, ~expected, nan_bits=nan_bits)
    assert index.size == words.size
    assert np.array_equal(new, expected)
    assert struct.unpack("<f", struct.pack("<I", EDGES[2]))[0] < float("inf")  # rounds up to infinity
    assert new[2] == 0x7F80
