"""The compiled write against its definition: element after element in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from torch_delta.vllm.routing import kernels
from torch_delta.vllm.routing.kernels import AHEAD, BLOCK, NEW_DIFFERS, OK, OLD_DIFFERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = [("<u4", "<u1"), ("<u4", "<u2"), ("<u4", "<u4"), ("<u8", "<u2")]
EDGES = [1, 2, AHEAD - 1, AHEAD, AHEAD + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + AHEAD, 3 * BLOCK + 5]


class Case:
    """Elements of several storages, back to back, and the run of them that is to be written.

    Each storage has guards on both sides, so that a write beside it shows.
    """

    def __init__(self, rng: np.random.Generator, index: str, bits: str, counts: Sequence[int] = ()) -> None:
        counts = counts or [int(rng.choice(EDGES)) for _ in range(int(rng.integers(1, 5)))]
        limit = 256 ** np.dtype(bits).itemsize
        self.memory = [rng.integers(0, limit, 4 * count + 16).astype(bits) for count in counts]
        places = [rng.choice(4 * count, count, replace=False) for count in counts]
        if rng.random() < 0.7:  # as everywhere but in transposed routes
            places = [np.sort(place) for place in places]
        self.index = np.concatenate(places).astype(index)
        self.old = np.concatenate([m[8:-8][p] for m, p in zip(self.memory, places, strict=True)])
        self.new = (self.old ^ rng.integers(0, limit, self.old.size).astype(bits)).astype(bits)  # a few stay the same
        self.addresses = np.array([m.ctypes.data + 8 * m.itemsize for m in self.memory], np.int64)
        self.ends = np.cumsum(counts).astype(np.int64)
        self.start = int(rng.integers(0, self.old.size))
        self.end = int(rng.integers(self.start, self.old.size)) + 1

    def place(self, element: int) -> tuple[int, int]:
        """Storage of an element, and where it lies in `memory`."""
        segment = next(at for at, end in enumerate(self.ends) if element < end)
        return segment, 8 + int(self.index[element])

    def run(self, kernel: Callable[..., Any]) -> tuple[int, int]:
        segment = self.place(self.start)[0]
        tables = self.addresses, self.ends, self.index, self.old, self.new
        at, outcome = kernel(*tables, segment, self.start, self.end)
        return int(at), int(outcome)

    def written_to(self, end: int) -> list[Any]:
        """What the memories should hold once all before `end` is written."""
        wanted = [memory.copy() for memory in self.memory]
        for element in range(self.start, end):
            segment, at = self.place(element)
            wanted[segment][at] = self.new[element]
        return wanted

    def assert_holds(self, wanted: list[Any]) -> None:
        for held, one in zip(self.memory, wanted, strict=True):
            np.testing.assert_array_equal(held, one)


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture
def kernel(kind: tuple[str, str]) -> Callable[..., Any]:
    found = kernels.compiled_write(np.dtype(kind[0]), np.dtype(kind[1]))
    if found is None:
        pytest.skip("numba is not installed")
    return found


@pytest.mark.parametrize("seed", range(12))
def test_exactly_the_run_is_written(kernel: Callable[..., Any], kind: tuple[str, str], seed: int) -> None:
    case = Case(np.random.default_rng(seed), *kind)
    wanted = case.written_to(case.end)
    assert case.run(kernel) == (case.end, OK)
    case.assert_holds(wanted)


@pytest.mark.parametrize("seed", range(12))
def test_an_element_that_differs_is_not_written_nor_anything_after_it(
    kernel: Callable[..., Any], kind: tuple[str, str], seed: int
) -> None:
    rng = np.random.default_rng(100 + seed)
    case = Case(rng, *kind)
    element = int(rng.integers(case.start, case.end))
    segment, at = case.place(element)
    case.memory[segment][at] ^= 1
    wanted = case.written_to(element)
    assert case.run(kernel) == (element, OLD_DIFFERS)
    case.assert_holds(wanted)


@pytest.mark.parametrize("seed", range(1, 13))
def test_an_element_that_does_not_read_back_ends_the_write_after_its_block(
    kernel: Callable[..., Any], kind: tuple[str, str], seed: int
) -> None:
    """Two elements in one place, made so that the second one finds what it expects: the first does not read back."""
    rng = np.random.default_rng(200 + seed)
    case = Case(rng, *kind, counts=(seed, BLOCK + seed, 7))
    case.start, case.end = 0, case.old.size
    first = seed + int(rng.integers(0, BLOCK - 1))  # in the first block of the second storage
    case.index[first + 1] = case.index[first]
    case.new[first] = case.old[first] ^ 1
    case.old[first + 1] = case.new[first]
    case.new[first + 1] = case.old[first] ^ 2
    wanted = case.written_to(seed + BLOCK)
    assert case.run(kernel) == (seed + BLOCK, NEW_DIFFERS)
    case.assert_holds(wanted)
