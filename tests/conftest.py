"""Hypothesis profiles: `default` explores, `ci` is derandomised so that a red run means a red change; and the lanes."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.lanes import pytest_collection, pytest_collection_modifyitems  # noqa: F401 - hooks, found by their names

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")
