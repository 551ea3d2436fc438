"""Hypothesis profiles: `default` explores, `ci` is derandomised so that a red run means a red change; and the lanes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

from tests.lanes import pytest_collection, pytest_collection_modifyitems  # noqa: F401 - hooks, found by their names

if TYPE_CHECKING:
    import pytest

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def pytest_configure(config: pytest.Config) -> None:
    # Compiled kernels of one run serve the next, and never those of the user; processes that tests start inherit it.
    cache = getattr(config, "cache", None)  # missing with `-p no:cacheprovider`
    os.environ["TORCH_DELTA_KERNEL_CACHE"] = "" if cache is None else str(cache.mkdir("kernels"))
