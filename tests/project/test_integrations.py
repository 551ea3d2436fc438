"""The integrations that are yet to come: they import, and say so when they are used."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(("module", "name"), [("torch_delta_trl", "DeltaSync"), ("torch_delta_skyrl", "DeltaStrategy")])
def test_using_one_says_what_to_do_instead(module: str, name: str) -> None:
    loaded = importlib.import_module(module)
    with pytest.raises(ImportError, match=f"{module}.{name}: .* not in this release.*use torch_delta.attach"):
        getattr(loaded, name)
    with pytest.raises(ImportError, match="not in this release"):
        exec(f"from {module} import {name}")
    assert not hasattr(loaded, "__path_of_nothing__")
