"""The integrations: importing one costs nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_importing_the_skyrl_integration_imports_neither_skyrl_nor_torch() -> None:
    code = (
        "import torch_delta_skyrl, sys; torch_delta_skyrl.ray_hook; "
        "print([m for m in ('skyrl', 'ray', 'vllm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_of_the_skyrl_integration_has_a_home() -> None:
    package = importlib.import_module("torch_delta_skyrl")
    assert set(package._HOME) == set(package.__all__)
    assert package.register.__module__ == "torch_delta_skyrl.registering"
    with pytest.raises(AttributeError, match="public names: ray_hook, register"):
        _ = package.Nothing


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
