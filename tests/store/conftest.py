"""A store in a directory of its own, and the servers of the object store tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.store.hubs import hub, hub_home, hub_url, running_hub  # noqa: F401 - fixtures
from tests.store.servers import azure, gcs, seaweed  # noqa: F401 - fixtures
from torch_delta.store import LocalStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root) -> LocalStore:
    return LocalStore(root)
