"""The README shows code that is code, and names that exist."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import torch_delta

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).resolve().parents[2] / "README.md").read_text(), flags=re.DOTALL
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_blocks_parse_and_name_what_is_public(block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch_delta":
            assert node.attr in torch_delta.__all__


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4


def test_capture_alone_runs_as_it_is_shown() -> None:
    import torch

    (block,) = (block for block in BLOCKS if "Capture(" in block)
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 3)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, values: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.linear(values).square().sum())

    model = Model()
    names = {
        "torch_delta": torch_delta,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [{"values": torch.ones(2, 4)}] * 2,
    }
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(block, "README.md", "exec"), names)
    names["capture"].close()
    assert [text.count("linear.weight 1.0") for text in shown.getvalue().split("linear.bias")] == [1, 1, 0]
