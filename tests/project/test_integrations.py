"""The integrations: importing one costs nothing; the one that is yet to come says so when it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_using_what_is_yet_to_come_says_what_to_do_instead() -> None:
    module, name = "torch_delta_skyrl", "DeltaStrategy"
    loaded = importlib.import_module(module)
    with pytest.raises(ImportError, match=f"{module}.{name}: .* not in this release.*use torch_delta.attach"):
        getattr(loaded, name)
    with pytest.raises(ImportError, match="not in this release"):
        exec(f"from {module} import {name}")
    assert not hasattr(loaded, "__path_of_nothing__")


def test_importing_the_trl_integration_imports_neither_trl_nor_torch() -> None:
    code = "import torch_delta_trl, sys; print([m for m in ('trl', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_of_the_trl_integration_has_a_home() -> None:
    package = importlib.import_module("torch_delta_trl")
    assert set(package._HOME) == set(package.__all__)
    assert package.DeltaSync.__module__ == "torch_delta_trl.delta_sync"
    with pytest.raises(AttributeError, match="public names: AsyncGRPOTrainer, DeltaSync"):
        _ = package.Nothing
