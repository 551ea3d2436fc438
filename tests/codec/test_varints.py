"""Lists of varints, whatever the largest of them, against a definition of one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.codec.packed import varints


def one(value: int) -> bytes:
    groups = [value & 127]
    while value := value >> 7:
        groups.append(value & 127)
    return bytes([group | 128 for group in groups[:-1]] + groups[-1:])


lists = st.integers(0, 63).flatmap(lambda bits: st.lists(st.integers(0, (1 << bits) - 1), max_size=50))


@given(lists)
def test_a_list_is_its_varints_one_after_the_other(values: list[int]) -> None:
    data = varints.encode(np.array(values, np.uint64))
    assert data == b"".join(map(one, values))
    assert varints.decode(memoryview(data), key="part").tolist() == values


@pytest.mark.parametrize("value", [0, 127, 128, (1 << 14) - 1, 1 << 14, (1 << 56) - 1, 1 << 56, (1 << 63) - 1])
def test_numbers_at_the_edge_of_a_group(value: int) -> None:
    for values in ([value], [1, value, 0], [value] * 3):
        data = varints.encode(np.array(values, np.uint64))
        assert data == b"".join(map(one, values))
        assert varints.decode(memoryview(data), key="part").tolist() == values
