"""Fixtures of the stream tests."""

from __future__ import annotations

import pytest

from tests.stream.samples import SCHEMA, make_info
from torch_delta.store import MemoryStore
from torch_delta.stream import Stream


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def writer(store) -> Stream:
    """The stream, created, at version 0."""
    stream = Stream(store)
    stream.create(make_info(), SCHEMA)
    return stream
