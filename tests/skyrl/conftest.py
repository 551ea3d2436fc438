"""What the SkyRL tests share: SkyRL itself, where it is installed, with our engines in its seat."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_SKYRL = importlib.util.find_spec("skyrl") is not None and importlib.util.find_spec("vllm") is not None
_IS_LANE = os.environ.get("TORCH_DELTA_LANE") == "skyrl"

if HAS_SKYRL:
    from tests.vllm.engines import prepare_environment

    prepare_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_SKYRL or _IS_LANE:
        return
    for item in items:
        if item.get_closest_marker("skyrl") is not None:
            item.add_marker(pytest.mark.skip(reason="SkyRL is not installed here; `make test-skyrl` has it"))


@pytest.fixture(scope="session")
def seat() -> None:
    """Our engines where SkyRL looks for its own, in this process."""
    from tests.skyrl.trainers import take_seat

    take_seat()
