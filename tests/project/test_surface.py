"""The public surface: what is exported, and what importing it may drag in."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import torch_delta

SURFACE = {
    "Capture",
    "Follower",
    "LocalCheckpoint",
    "PublishConfig",
    "Publisher",
    "RetentionConfig",
    "TensorSource",
    "TorchDeltaError",
    "attach",
    "attach_source",
    "open_store",
    "pull",
}


def test_all_is_the_frozen_surface_and_every_name_loads() -> None:
    assert set(torch_delta.__all__) == SURFACE
    for name in torch_delta.__all__:
        assert getattr(torch_delta, name) is not None
    assert set(torch_delta.__all__) <= set(dir(torch_delta))


def test_no_public_name_shadows_a_subpackage() -> None:
    subpackages = {module.name for module in pkgutil.iter_modules(torch_delta.__path__)}
    assert SURFACE.isdisjoint(subpackages)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="public names: Capture"):
        torch_delta.nonsense  # noqa: B018


@pytest.mark.parametrize("package", ["format", "codec", "store", "stream", "capture", "publish", "receive", "testing"])
def test_every_subpackage_exports_what_it_says(package: str) -> None:
    module = importlib.import_module(f"torch_delta.{package}")
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def loaded_after(statement: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter after `statement`."""
    code = (
        f"{statement}\nimport sys\n"
        "print(*(m.split('.')[0] for m in sys.modules), *(m for m in sys.modules if m.startswith('torch.dist')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import torch_delta", {"torch", "numpy", "vllm", "obstore", "numba", "huggingface_hub", "rich"}),
        ("import torch_delta.format", {"torch", "numpy", "zstandard"}),
        ("import torch_delta.codec", {"torch", "numba"}),
        ("import torch_delta.store", {"torch", "obstore", "huggingface_hub"}),
        ("from torch_delta import Follower, LocalCheckpoint", {"torch", "torch.distributed", "vllm", "obstore"}),
        ("from torch_delta import attach", {"vllm", "obstore", "numba", "transformers"}),
    ],
)
def test_imports_stay_light(statement: str, absent: set[str]) -> None:
    assert loaded_after(statement) & absent == set()


def test_the_import_check_can_fail() -> None:
    assert "numpy" in loaded_after("import numpy")
