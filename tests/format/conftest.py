"""What the tests of the format share: the rule an error must name, and small valid objects to break."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import FormatError, UnsupportedFormat
from torch_delta.format import Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def refuses() -> Callable:
    """`with refuses("K1"): ...` passes if the block raises a FormatError that names the rule, in fact and in text."""

    @contextmanager
    def check(rule: str, match: str | None = None, *, unsupported: bool = False) -> Iterator[None]:
        with pytest.raises(FormatError, match=match) as caught:
            yield
        assert caught.value.rule == rule, caught.value
        assert f"rule {rule}" in str(caught.value)
        assert isinstance(caught.value, UnsupportedFormat) == unsupported

    return check


def _sealed(line: str | bytes | dict) -> bytes:
    if isinstance(line, dict):
        line = json.dumps(line)
    if isinstance(line, str):
        line = line.encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


@pytest.fixture
def sealed() -> Callable:
    """Seal a line of JSON, or a dict, with hashlib alone."""
    return _sealed


@pytest.fixture
def schema() -> Schema:
    """0 bias F32 [3], 1 cube I8 [2,3,4], 2 scalar I64 [], 3 w BF16 [4,2], 4 wide BF16 [8,8], 5 z_tied -> w."""
    return Schema(
        (
            TensorSpec("bias", "F32", (3,)),
            TensorSpec("cube", "I8", (2, 3, 4)),
            TensorSpec("scalar", "I64", ()),
            TensorSpec("w", "BF16", (4, 2)),
            TensorSpec("wide", "BF16", (8, 8)),
            TensorSpec("z_tied", "BF16", (4, 2), alias_of="w"),
        )
    )
