"""Shipped for tests of this package and of whatever is built on it: conformance suites, fault injection, crash points.

`store_suite` holds the tests every store passes (it needs pytest), `faults` a store that fails by script,
`torch_delta.crashpoints` the named places where a process can be made to die. Each loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_delta.testing.faults import Crash, Effect, Fault, FaultyStore
    from torch_delta.testing.store_suite import StoreSuite

_HOME = {
    "Crash": "faults",
    "Effect": "faults",
    "Fault": "faults",
    "FaultyStore": "faults",
    "StoreSuite": "store_suite",
}

__all__ = ["Crash", "Effect", "Fault", "FaultyStore", "StoreSuite"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(
            f"module 'torch_delta.testing' has no attribute {name!r}; public names: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"torch_delta.testing.{home}"), name)
