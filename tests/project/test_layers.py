"""Imports point strictly downwards: the table of docs/design (format < codec < store < stream < capture < ...)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_delta"

# What each layer may import besides itself and the ground (errors, config, events, crashpoints).
GROUND = {"errors", "config", "events", "crashpoints"}
ALLOWED = {
    "errors": set(),
    "events": {"errors"},
    "config": {"errors"},
    "crashpoints": {"errors"},
    "format": GROUND,
    "codec": GROUND | {"format"},
    "store": GROUND | {"format"},
    "stream": GROUND | {"format", "store"},
    "capture": GROUND | {"format", "codec"},
    "publish": GROUND | {"format", "codec", "store", "stream", "capture"},
    "receive": GROUND | {"format", "codec", "store", "stream"},
    "vllm": GROUND | {"format", "codec", "store", "stream", "receive"},
    "testing": GROUND | {"format", "codec", "store", "stream"},
    "cli": GROUND | {"format", "codec", "store", "stream", "receive"},
}
# Third parties a layer may not touch, not even lazily.
FORBIDDEN = {
    "format": {"torch", "numpy", "zstandard", "xxhash", "safetensors", "huggingface_hub"},
    "codec": {"torch", "safetensors", "huggingface_hub"},
    "store": {"torch", "numpy"},
    "stream": {"torch", "numpy"},
    "receive": {"torch"},
}


def imported(path: Path) -> set[str]:
    """Dotted names of every module `path` imports, anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names.add(node.module)
            if node.module == "torch_delta":
                names.update(f"torch_delta.{alias.name}" for alias in node.names)
    return names


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def violations(layer: str, names: set[str]) -> list[str]:
    found = []
    for name in sorted(names):
        top, _, rest = name.partition(".")
        if top == "torch_delta" and rest:
            target = rest.split(".")[0]
            if target != layer and target in ALLOWED and target not in ALLOWED[layer]:
                found.append(f"{layer} imports {name}")
        elif top in FORBIDDEN.get(layer, set()):
            found.append(f"{layer} imports {name}")
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    layer = layer_of(path)
    assert layer in ALLOWED, f"{path}: a new layer needs a row in ALLOWED"
    assert violations(layer, imported(path)) == []


def test_the_check_can_fail() -> None:
    assert violations("format", {"torch_delta.codec.digest"}) == ["format imports torch_delta.codec.digest"]
    assert violations("receive", {"torch_delta.publish", "torch"}) == [
        "receive imports torch",
        "receive imports torch_delta.publish",
    ]
